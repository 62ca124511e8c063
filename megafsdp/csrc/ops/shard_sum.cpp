#include "shard_sum.h"

#include "../kernels/shard_sum.h"
#include "arguments.h"
#include "dtypes.h"

namespace megafsdp {
namespace {

// Like visit_dtype, also for sums in double.
template <typename Visit>
bool visit_summed(const std::string& name, const Visit& visit) {
  if (name == "float64") return visit(double{}), true;
  return visit_dtype(name, visit);
}

uintptr_t itemsize_of(const std::string& argument, const std::string& dtype) {
  uintptr_t itemsize = 0;
  if (!visit_summed(dtype, [&](auto element) { itemsize = sizeof element; })) {
    throw std::invalid_argument(argument +
                                ": expected float64, float32, bfloat16 or float16, got " + dtype);
  }
  return itemsize;
}

}  // namespace

void check_shard_sum(const ShardSumArguments& arguments) {
  const uintptr_t shard_itemsize = itemsize_of("shard_dtype", arguments.shard_dtype);
  const uintptr_t out_itemsize = itemsize_of("out_dtype", arguments.out_dtype);
  check(!arguments.shards.empty(), "shards: expected at least one, got none");
  check_positive("numel", arguments.numel);
  check_address("out", arguments.out, out_itemsize);
  for (uintptr_t address : arguments.shards) check_address("shards", address, shard_itemsize);
}

void run_shard_sum(const ShardSumArguments& arguments, Simd level) {
  visit_summed(arguments.shard_dtype, [&](auto in) {
    visit_summed(arguments.out_dtype, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      std::vector<const In*> shards;
      for (uintptr_t address : arguments.shards) {
        shards.push_back(reinterpret_cast<const In*>(address));
      }
      shard_sum_at<In, Out>(level, {shards.data(), static_cast<int64_t>(shards.size()),
                                    reinterpret_cast<Out*>(arguments.out), arguments.numel,
                                    arguments.scale, arguments.accumulate});
    });
  });
}

}  // namespace megafsdp
