#include "noise.h"

#include "../kernels/hadamard.h"
#include "../kernels/philox.h"
#include "../kernels/threads.h"
#include "arguments.h"
#include "dtypes.h"

namespace megafsdp {
namespace {

int64_t num_blocks_of(const HadamardArguments& arguments) {
  return (arguments.num_rows + kHadamardRows - 1) / kHadamardRows;
}

}  // namespace

void check_uniform(const UniformArguments& arguments) {
  check_positive("numel", arguments.numel);
  check_address("out", arguments.out, sizeof(float));
  check(arguments.stream >= 0 && arguments.stream <= UINT32_MAX,
        "stream: expected a number of 32 bits, got " + std::to_string(arguments.stream));
}

void check_hadamard(const HadamardArguments& arguments) {
  uintptr_t itemsize = 0;
  const bool is_known =
      visit_dtype(arguments.dtype, [&](auto element) { itemsize = sizeof element; });
  check(is_known, "dtype: expected float32, bfloat16 or float16, got " + arguments.dtype);
  check_positive("num_rows", arguments.num_rows);
  check_positive("num_cols", arguments.num_cols);
  check_address("values", arguments.values, itemsize);
  check_address("out", arguments.out, sizeof(float));
  const uintptr_t num_cols = static_cast<uintptr_t>(arguments.num_cols);
  const uintptr_t read = static_cast<uintptr_t>(arguments.num_rows) * num_cols * itemsize;
  const uintptr_t written =
      static_cast<uintptr_t>(num_blocks_of(arguments) * kHadamardRows) * num_cols * sizeof(float);
  check(arguments.out + written <= arguments.values || arguments.values + read <= arguments.out,
        "out: expected memory apart from values");
}

void run_uniform(const UniformArguments& arguments, int64_t num_threads, Simd level) {
  const int64_t num_counters = (arguments.numel + kWordsPerCounter - 1) / kWordsPerCounter;
  auto* const out = reinterpret_cast<float*>(arguments.out);
  parallel_ranges(num_counters, kCounterBlock, kMinRangeNumel / kWordsPerCounter, num_threads,
                  [&](int64_t first, int64_t last) {
                    run_at(level, UniformJob{arguments.seed, static_cast<uint32_t>(arguments.stream),
                                             first, last, arguments.numel, out});
                  });
}

void run_hadamard(const HadamardArguments& arguments, int64_t num_threads, Simd level) {
  const int64_t of_block = kHadamardRows * arguments.num_cols;
  const int64_t min_blocks = (kMinRangeNumel + of_block - 1) / of_block;
  auto* const out = reinterpret_cast<float*>(arguments.out);
  visit_dtype(arguments.dtype, [&](auto element) {
    using Source = decltype(element);
    const auto* const values = reinterpret_cast<const Source*>(arguments.values);
    parallel_ranges(num_blocks_of(arguments), 1, min_blocks, num_threads,
                    [&](int64_t first, int64_t last) {
                      const DenormalMode mode(false);
                      run_at(level, HadamardJob<Source>{values, arguments.num_rows,
                                                        arguments.num_cols, first, last, out});
                    });
  });
}

}  // namespace megafsdp
