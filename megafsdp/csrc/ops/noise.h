// Random numbers for stochastic rounding, and the Hadamard transform before it, on a CPU.
#pragma once

#include <cstdint>
#include <string>

#include "../kernels/simd.h"

namespace megafsdp {

// A range of 1-D fp32 memory to fill.
struct UniformArguments {
  uintptr_t out;
  int64_t numel;
  uint64_t seed;
  int64_t stream;
};

// values is (rows, cols) of the named type; out is fp32, its rows rounded up to 16.
struct HadamardArguments {
  uintptr_t values;
  std::string dtype;
  int64_t num_rows;
  int64_t num_cols;
  uintptr_t out;
};

// Throw std::invalid_argument that names the argument.
void check_uniform(const UniformArguments& arguments);
void check_hadamard(const HadamardArguments& arguments);

// Fills out with numbers in [0, 1).
void run_uniform(const UniformArguments& arguments, int64_t num_threads, Simd level);

// Writes the transformed rows.
void run_hadamard(const HadamardArguments& arguments, int64_t num_threads, Simd level);

}  // namespace megafsdp
