// One thread's part of the sum of squares: a lane of a block, in the order of
// kernels/square_sum_order.h. The file compiles for the host too, where a test runs all lanes.
#pragma once

#include <cmath>
#include <cstdint>

#include "../kernels/float16.h"
#include "square_table.h"

namespace megafsdp {

// Values that a thread has in flight at once.
constexpr int kAhead = 16;

template <typename T>
MEGAFSDP_INLINE double lane_sum_of(const T* values, int64_t numel, int64_t block, int lane) {
  const T* from = values + block * kSquareBlockNumel;
  const int64_t left = numel - block * kSquareBlockNumel;
  const int64_t stop = left < kSquareBlockNumel ? left : kSquareBlockNumel;
  double sum = 0.0;
  int64_t i = lane;
  for (; i + (kAhead - 1) * kSquareLanes < stop; i += kAhead * kSquareLanes) {
    T ahead[kAhead];
    MEGAFSDP_UNROLL
    for (int k = 0; k < kAhead; ++k) ahead[k] = from[i + k * kSquareLanes];
    MEGAFSDP_UNROLL
    for (int k = 0; k < kAhead; ++k) {
      const double value = to_float(ahead[k]);
      sum = fma(value, value, sum);
    }
  }
  for (; i < stop; i += kSquareLanes) {
    const double value = to_float(from[i]);
    sum = fma(value, value, sum);
  }
  return sum;
}

// Returns the sum of one lane of a block, by its number among the buffer's own.
MEGAFSDP_INLINE double lane_sum(const SquareRow& row, int64_t block, int lane) {
  switch (row.dtype) {
    case Dtype::kBFloat16:
      return lane_sum_of(static_cast<const BFloat16*>(row.values), row.numel, block, lane);
    case Dtype::kFloat16:
      return lane_sum_of(static_cast<const Float16*>(row.values), row.numel, block, lane);
    default:
      return lane_sum_of(static_cast<const float*>(row.values), row.numel, block, lane);
  }
}

}  // namespace megafsdp
