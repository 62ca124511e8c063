// Adam and the sum of squares with element types given by name, arguments checked.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels/simd.h"

namespace megafsdp {

// Arguments of one step as they come from Python. remainder and copy_out may be null; a segment is
// start, stop and the constants in the order of AdamConstants.
struct AdamArguments {
  uintptr_t weight;
  uintptr_t remainder;
  uintptr_t grad;
  uintptr_t exp_avg;
  uintptr_t exp_avg_sq;
  uintptr_t copy_out;
  int64_t numel;
  std::string grad_dtype;
  std::string state_dtype;
  std::string copy_out_dtype;
  std::vector<std::tuple<int64_t, int64_t, std::array<double, 8>>> segments;
  double grad_scale;
  bool flush_denormals;
  int64_t num_threads;
};

struct SquareSumArguments {
  uintptr_t values;
  int64_t numel;
  std::string dtype;
  int64_t num_threads;
};

// Throw std::invalid_argument, naming the argument, if one of them cannot be right.
void check_adam(const AdamArguments& arguments);
void check_square_sum(const SquareSumArguments& arguments);

// Run checked arguments; touch no Python object.
void run_adam(const AdamArguments& arguments, Simd level);
double run_square_sum(const SquareSumArguments& arguments, Simd level);

}  // namespace megafsdp
