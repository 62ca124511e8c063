// Sums of squares of blocks; square_sum_order.h says in which order squares are added.
#pragma once

#include <cstdint>

#include "float16.h"
#include "simd.h"
#include "square_sum_order.h"

namespace megafsdp {

constexpr int64_t kSquareTileNumel = 128;

template <typename T>
struct SquareSum {
  const T* values;
  int64_t numel;
  double* block_sums;
};

template <typename T>
MEGAFSDP_INLINE void square_sum(const SquareSum<T>& job, int64_t first_block, int64_t last_block) {
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t start = block * kSquareBlockNumel;
    const int64_t left = job.numel - start;
    const int64_t count = left < kSquareBlockNumel ? left : kSquareBlockNumel;
    const T* values = job.values + start;
    double lanes[kSquareLanes] = {};
    int64_t first = 0;
    // A tile at a time: the compiler vectorises conversion and additions only as separate loops.
    for (; first + kSquareTileNumel <= count; first += kSquareTileNumel) {
      float tile[kSquareTileNumel];
      for (int64_t i = 0; i < kSquareTileNumel; ++i) tile[i] = to_float(values[first + i]);
      for (int64_t row = 0; row < kSquareTileNumel; row += kSquareLanes) {
        for (int64_t lane = 0; lane < kSquareLanes; ++lane) {
          const double value = static_cast<double>(tile[row + lane]);
          lanes[lane] += value * value;
        }
      }
    }
    for (int64_t i = first; i < count; ++i) {
      const double value = static_cast<double>(to_float(values[i]));
      lanes[i % kSquareLanes] += value * value;
    }
    double sum = 0.0;
    for (double lane : lanes) sum += lane;
    job.block_sums[block] = sum;
  }
}

template <typename T>
void square_sum_scalar(const SquareSum<T>& job, int64_t first_block, int64_t last_block) {
  square_sum(job, first_block, last_block);
}

template <typename T>
MEGAFSDP_AVX2 void square_sum_avx2(const SquareSum<T>& job, int64_t first_block,
                                   int64_t last_block) {
  square_sum(job, first_block, last_block);
}

template <typename T>
MEGAFSDP_AVX512 void square_sum_avx512(const SquareSum<T>& job, int64_t first_block,
                                       int64_t last_block) {
  square_sum(job, first_block, last_block);
}

template <typename T>
void square_sum_at(Simd level, const SquareSum<T>& job, int64_t first_block, int64_t last_block) {
  switch (level) {
    case Simd::kScalar:
      return square_sum_scalar(job, first_block, last_block);
    case Simd::kAvx2:
      return square_sum_avx2(job, first_block, last_block);
    case Simd::kAvx512:
      return square_sum_avx512(job, first_block, last_block);
  }
}

}  // namespace megafsdp
