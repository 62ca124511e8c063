// The random Hadamard transform of 16 rows: fixed signs, a factor of 1/4, and sums of pairs of rows
// at distances 1, 2, 4 and 8. The order of sums is fixed, so the bits are the same everywhere.
#pragma once

#include <cstdint>

#include "float16.h"
#include "inline.h"

namespace megafsdp {

constexpr int64_t kHadamardRows = 16;
constexpr int64_t kHadamardCols = 64;

template <typename Source>
struct HadamardJob {
  const Source* values;
  // Number of rows; rows missing from the last block count as zeros.
  int64_t num_rows;
  int64_t num_cols;
  int64_t first_block;
  int64_t last_block;
  float* out;

  MEGAFSDP_INLINE void operator()() const {
    for (int64_t block = first_block; block < last_block; ++block) {
      for (int64_t col = 0; col < num_cols; col += kHadamardCols) {
        const int64_t left = num_cols - col;
        transform(block * kHadamardRows, col, left < kHadamardCols ? left : kHadamardCols);
      }
    }
  }

  MEGAFSDP_INLINE void transform(int64_t first_row, int64_t first_col, int64_t count) const {
    constexpr float kSigns[kHadamardRows] = {1, 1,  1,  -1, 1, -1, -1, -1,
                                             -1, -1, -1, 1,  -1, 1, -1, -1};
    float rows[kHadamardRows][kHadamardCols];
    for (int64_t row = 0; row < kHadamardRows; ++row) {
      const float factor = kSigns[row] * 0.25f;
      if (first_row + row < num_rows) {
        const Source* const from = values + (first_row + row) * num_cols + first_col;
        for (int64_t i = 0; i < count; ++i) rows[row][i] = to_float(from[i]) * factor;
      } else {
        for (int64_t i = 0; i < count; ++i) rows[row][i] = 0.0f * factor;
      }
    }
    for (int64_t distance = 1; distance < kHadamardRows; distance *= 2) {
      for (int64_t first = 0; first < kHadamardRows; first += 2 * distance) {
        for (int64_t row = first; row < first + distance; ++row) {
          float* const upper = rows[row];
          float* const lower = rows[row + distance];
          for (int64_t i = 0; i < count; ++i) {
            const float sum = upper[i] + lower[i], difference = upper[i] - lower[i];
            upper[i] = sum;
            lower[i] = difference;
          }
        }
      }
    }
    for (int64_t row = 0; row < kHadamardRows; ++row) {
      float* const to = out + (first_row + row) * num_cols + first_col;
      for (int64_t i = 0; i < count; ++i) to[i] = rows[row][i];
    }
  }
};

}  // namespace megafsdp
