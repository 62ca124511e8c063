// Histories of delayed scaling, on a CPU.
#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "../kernels/simd.h"

namespace megafsdp {

// Addresses of int32: histories (rows, length), maxima and used (rows,). Rows.
using HistoriesArguments = std::tuple<uintptr_t, uintptr_t, uintptr_t, int64_t>;

struct RollArguments {
  std::vector<HistoriesArguments> weights;
  // Histories of inputs and gradients.
  std::vector<HistoriesArguments> operands;
  int64_t length;
};

// Throw std::invalid_argument that names the argument.
void check_roll(const RollArguments& arguments);

// Appends maxima to histories and writes the maxima that scales are made from.
void run_roll(const RollArguments& arguments, Simd level);

}  // namespace megafsdp
