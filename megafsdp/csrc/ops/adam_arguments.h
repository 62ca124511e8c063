// Arguments of Adam and of the sum of squares as they come from Python, checked and converted to
// the kernels' own types. The checks are the same for a CPU and for CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels/adam_buffers.h"
#include "arguments.h"

namespace megafsdp {

// remainder and copy_out may be null, and so may the new ones, all or none of them; a segment is
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
  uintptr_t new_weight = 0;
  uintptr_t new_exp_avg = 0;
  uintptr_t new_exp_avg_sq = 0;
};

struct SquareSumArguments {
  uintptr_t values;
  int64_t numel;
  std::string dtype;
};

inline Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBFloat16;
  if (name == "float16") return Dtype::kFloat16;
  return Dtype::kNone;
}

inline void check_segments(const AdamArguments& arguments) {
  int64_t end = 0;
  for (const auto& [start, stop, constants] : arguments.segments) {
    check(end <= start && start <= stop && stop <= arguments.numel,
          "segments: expected rising, disjoint ranges below " + std::to_string(arguments.numel) +
              ", got " + std::to_string(start) + " to " + std::to_string(stop));
    end = stop;
  }
}

// Throws std::invalid_argument, naming the argument, if one of them cannot be right.
inline void check_adam(const AdamArguments& arguments) {
  const bool has_remainder = arguments.remainder != 0;
  const Dtype grad_dtype = dtype_of(arguments.grad_dtype);
  const Dtype state_dtype = dtype_of(arguments.state_dtype);
  const Dtype copy_out_dtype = dtype_of(arguments.copy_out_dtype);
  check(grad_dtype != Dtype::kNone,
        "grad_dtype: expected float32, bfloat16 or float16, got " + arguments.grad_dtype);
  check(state_dtype == Dtype::kFloat32 || state_dtype == Dtype::kBFloat16,
        "state_dtype: expected float32 or bfloat16, got " + arguments.state_dtype);
  check_positive("numel", arguments.numel);
  check_address("weight", arguments.weight, has_remainder ? 2 : 4);
  check_address("grad", arguments.grad, itemsize_of(grad_dtype));
  check_address("exp_avg", arguments.exp_avg, itemsize_of(state_dtype));
  check_address("exp_avg_sq", arguments.exp_avg_sq, itemsize_of(state_dtype));
  if (has_remainder) check_address("remainder", arguments.remainder, 2);
  check(arguments.copy_out == 0 || !has_remainder, "copy_out: expected null beside a remainder");
  if (arguments.copy_out != 0) {
    check_address("copy_out", arguments.copy_out, 2);
    check(copy_out_dtype == Dtype::kBFloat16 || copy_out_dtype == Dtype::kFloat16,
          "copy_out_dtype: expected bfloat16 or float16, got " + arguments.copy_out_dtype);
  }
  if (arguments.new_weight != 0 || arguments.new_exp_avg != 0 || arguments.new_exp_avg_sq != 0) {
    check(!has_remainder, "new_weight: expected null beside a remainder");
    check(state_dtype == Dtype::kFloat32,
          "state_dtype: expected float32 beside new_weight, got " + arguments.state_dtype);
    check_address("new_weight", arguments.new_weight, 4);
    check_address("new_exp_avg", arguments.new_exp_avg, 4);
    check_address("new_exp_avg_sq", arguments.new_exp_avg_sq, 4);
  }
  check_segments(arguments);
}

inline AdamBuffers buffers_of(const AdamArguments& arguments) {
  return {reinterpret_cast<void*>(arguments.weight),
          reinterpret_cast<int16_t*>(arguments.remainder),
          reinterpret_cast<const void*>(arguments.grad),
          reinterpret_cast<void*>(arguments.exp_avg),
          reinterpret_cast<void*>(arguments.exp_avg_sq),
          reinterpret_cast<void*>(arguments.copy_out),
          dtype_of(arguments.grad_dtype),
          dtype_of(arguments.state_dtype),
          arguments.copy_out == 0 ? Dtype::kNone : dtype_of(arguments.copy_out_dtype),
          static_cast<float>(arguments.grad_scale),
          false,
          false,
          reinterpret_cast<float*>(arguments.new_weight),
          reinterpret_cast<float*>(arguments.new_exp_avg),
          reinterpret_cast<float*>(arguments.new_exp_avg_sq)};
}

inline std::vector<AdamSegment> segments_of(const AdamArguments& arguments) {
  std::vector<AdamSegment> segments;
  for (const auto& [start, stop, numbers] : arguments.segments) {
    std::array<float, 8> c;
    for (size_t i = 0; i < c.size(); ++i) c[i] = static_cast<float>(numbers[i]);
    segments.push_back({start, stop, {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]}});
  }
  return segments;
}

inline void check_square_sum(const SquareSumArguments& arguments) {
  const Dtype dtype = dtype_of(arguments.dtype);
  check(dtype != Dtype::kNone,
        "dtype: expected float32, bfloat16 or float16, got " + arguments.dtype);
  check_positive("numel", arguments.numel);
  check_address("values", arguments.values, itemsize_of(dtype));
}

}  // namespace megafsdp
