// The buffers of a launch of the sum of squares, and the runs of sums that are added after it.
// Tables are arguments of launches, and all buffers of a table share the blocks of its launch:
//
//   buffer    0             1    2                 numel 9000, 10, 12000
//   block     0  1  2       3    4  5  6           first 0, 3, 4
//
// The file compiles for the host too, where a test goes through all blocks and runs in turn.
#pragma once

#include <cstdint>

#include "../kernels/square_sum_order.h"
#include "adam.h"

namespace megafsdp {

// Together below the 4 KB that arguments of a kernel may have.
constexpr int kMostBuffers = 96;

// The sums of a buffer's blocks lie in its part of the scratch, followed by those of its runs.
struct SquareRow {
  const void* values;
  int64_t numel;
  int64_t first;
  double* sums;
  Dtype dtype;
};

struct SquareTable {
  SquareRow rows[kMostBuffers];
  int count = 0;
  int64_t num_blocks = 0;
};

// Sums of one level of a buffer. The runs' sums go to the next level, the last one to the total.
struct RunRow {
  const double* sums;
  int64_t count;
  int64_t first;
  double* run_sums;
  double* total;
};

struct RunTable {
  RunRow rows[kMostBuffers];
  int count = 0;
  int64_t num_runs = 0;
};

// Returns the row that a block or run belongs to, by its number among all of a table.
template <typename Row>
MEGAFSDP_INLINE const Row& row_of(const Row* rows, int count, int64_t number) {
  int first = 0;
  for (int last = count; last - first > 1;) {
    const int middle = first + (last - first) / 2;
    if (rows[middle].first <= number) {
      first = middle;
    } else {
      last = middle;
    }
  }
  return rows[first];
}

inline int64_t parts_of(int64_t count, int64_t part) { return (count + part - 1) / part; }

inline SquareTable table_of(const SquareSumValues* buffers, int count, double* scratch) {
  SquareTable table;
  for (; table.count < count; ++table.count) {
    const SquareSumValues& own = buffers[table.count];
    table.rows[table.count] = {own.values, own.numel, table.num_blocks, scratch, own.dtype};
    table.num_blocks += parts_of(own.numel, kSquareBlockNumel);
    scratch += square_sum_scratch_numel(own.numel);
  }
  return table;
}

inline void add_level(const double* sums, int64_t count, double* total, RunTable& table) {
  const int64_t num_runs = parts_of(count, kSquareRun);
  double* const above = const_cast<double*>(sums) + count;
  table.rows[table.count++] = {sums, count, table.num_runs, num_runs == 1 ? total : above, total};
  table.num_runs += num_runs;
}

// Returns the runs of the blocks' sums; totals are in the order of the buffers.
inline RunTable runs_of(const SquareTable& blocks, double* totals) {
  RunTable table;
  for (int i = 0; i < blocks.count; ++i) {
    const int64_t count = parts_of(blocks.rows[i].numel, kSquareBlockNumel);
    add_level(blocks.rows[i].sums, count, totals + i, table);
  }
  return table;
}

// Returns the runs of the runs' sums, for buffers that have more than one run.
inline RunTable runs_of(const RunTable& below) {
  RunTable table;
  for (int i = 0; i < below.count; ++i) {
    const RunRow& row = below.rows[i];
    const int64_t count = parts_of(row.count, kSquareRun);
    if (count > 1) add_level(row.run_sums, count, row.total, table);
  }
  return table;
}

}  // namespace megafsdp
