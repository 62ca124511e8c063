// The ranges of a launch of Adam, and the constants of each. They are arguments of the launch, so
// it waits for no copy and a graph may capture it; ranges without room go with the next launch.
//
// Ranges of a buffer have few different constants, so a range stores the index of its constants:
//
//   rows [0, 64) 0   [64, 96) 1   [96, 960) 0   ...      constants 0: with decay   1: without
//
// The file compiles for the host too, where a test makes the tables of a launch.
#pragma once

#include <cstdint>
#include <cstring>

#include "../kernels/adam_buffers.h"

namespace megafsdp {

// Together 3.5 KB of the 4 KB that arguments of a kernel may have.
constexpr int kMostRows = 80;
constexpr int kMostConstants = 32;

struct alignas(16) AdamRow {
  int64_t start;
  int64_t stop;
  int32_t constants;
};

struct AdamTable {
  AdamRow rows[kMostRows];
  AdamConstants constants[kMostConstants];
  int32_t num_rows = 0;
  int32_t num_constants = 0;
};

// Returns the index of constants in a table, which may be a new one; -1 if there is no room.
inline int32_t place_of(const AdamConstants& constants, AdamTable& table) {
  for (int32_t i = 0; i < table.num_constants; ++i) {
    if (std::memcmp(&table.constants[i], &constants, sizeof constants) == 0) return i;
  }
  if (table.num_constants == kMostConstants) return -1;
  table.constants[table.num_constants] = constants;
  return table.num_constants++;
}

// Fills an empty table with segments, from first on while there is room; returns the first one that
// is left. Late constants are elsewhere, one for each segment from first on.
inline int64_t fill_table(const AdamSegment* segments, int64_t num_segments, int64_t first,
                          bool are_late, AdamTable& table) {
  int64_t i = first;
  for (; i < num_segments && i - first < kMostRows; ++i) {
    const AdamSegment& segment = segments[i];
    if (segment.start == segment.stop) continue;
    const auto number = static_cast<int32_t>(i - first);
    const int32_t place = are_late ? number : place_of(segment.constants, table);
    if (place < 0) break;
    table.rows[table.num_rows++] = {segment.start, segment.stop, place};
  }
  if (are_late) table.num_constants = static_cast<int32_t>(i - first);
  return i;
}

}  // namespace megafsdp
