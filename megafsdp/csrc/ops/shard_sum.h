// The shard sum with its element types given by name, arguments checked.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../kernels/simd.h"

namespace megafsdp {

// Arguments of one sum as they come from Python: addresses, sizes, and types by torch's short names
// (float64, float32, bfloat16, float16).
struct ShardSumArguments {
  std::vector<uintptr_t> shards;
  uintptr_t out;
  int64_t numel;
  std::string shard_dtype;
  std::string out_dtype;
  double scale;
  bool accumulate;
};

// Throws std::invalid_argument, naming the argument, if one of them cannot be right.
void check_shard_sum(const ShardSumArguments& arguments);

// Sums checked arguments; touches no Python object.
void run_shard_sum(const ShardSumArguments& arguments, Simd level);

}  // namespace megafsdp
