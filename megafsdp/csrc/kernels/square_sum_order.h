// The order in which squares are added, on every processor.
//
//   element i of a block of 4096 is added to lane i % 16, upwards; lanes are added in order: the
//   block's sum. Each run of 256 sums is added in order to one sum, and so on until one is left.
//
// Squares of floats are exact in double, so it makes no difference whether they are rounded before
// they are added. Runs bound the longest chain of additions that wait for each other.
#pragma once

#include <cstdint>

#include "inline.h"

namespace megafsdp {

constexpr int64_t kSquareLanes = 16;
constexpr int64_t kSquareBlockNumel = 4096;
constexpr int kSquareRun = 256;

// Returns how many doubles all sums before the last take: those of blocks, of runs, and so on.
inline int64_t square_sum_scratch_numel(int64_t numel) {
  int64_t count = (numel + kSquareBlockNumel - 1) / kSquareBlockNumel;
  int64_t total = count;
  while (count > 1) total += count = (count + kSquareRun - 1) / kSquareRun;
  return total;
}

// Adds sums in place, runs of runs, to one.
inline double add_in_runs(double* sums, int64_t count) {
  while (count > 1) {
    int64_t num_runs = 0;
    for (int64_t start = 0; start < count; start += kSquareRun) {
      double total = 0.0;
      for (int64_t i = start; i < start + kSquareRun && i < count; ++i) total += sums[i];
      sums[num_runs++] = total;
    }
    count = num_runs;
  }
  return count == 0 ? 0.0 : sums[0];
}

}  // namespace megafsdp
