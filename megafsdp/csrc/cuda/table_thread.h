// One thread's part of tables of scales, and of the largest maxima of matrices that two levels
// need.
//
// All tables of a launch share its blocks. Each block takes an item: kTableItem places of one
// table. The places of a table are its tiles, then its matrices if there are two levels, then its
// padding. The file compiles for the host too, where a test runs all threads in turn.
#pragma once

#include <cstdint>

#include "../kernels/tile_buffers.h"
#include "raise.h"
#include "tile_factors.h"

namespace megafsdp {

constexpr int kTableThreads = 256;
constexpr int kPlacesOfThread = 4;
constexpr int64_t kTableItem = kTableThreads * kPlacesOfThread;
constexpr int kMostTables = 32;

struct TableRow {
  const int32_t* maxima;
  // For two levels: the largest maximum of each matrix, and its place in the table.
  uint32_t* largest;
  float* of_matrices;
  void* entries;
  uint8_t* padding;
  int64_t num_tiles;
  int64_t tiles_per_matrix;
  int64_t num_places;
  int64_t first_item;
};

struct TableOfTables {
  TableRow rows[kMostTables];
  int count = 0;
  int64_t num_items = 0;
};

// Lays out a table, which may have no entries; largest is null except for two levels.
inline TableRow laid_out(const ScaleTable& table, uint32_t* largest) {
  TableRow row{};
  row.maxima = table.maxima;
  row.largest = largest;
  row.of_matrices = table.of_matrices;
  row.entries = table.entries;
  row.padding = table.padding;
  row.num_tiles = table.grid.num_tiles();
  row.tiles_per_matrix = table.grid.tiles_per_matrix();
  row.num_places = row.num_tiles + table.padding_nbytes;
  if (table.of_matrices != nullptr) row.num_places += table.grid.num_matrices;
  return row;
}

inline void add_row(const TableRow& row, TableOfTables& table) {
  table.rows[table.count] = row;
  table.rows[table.count++].first_item = table.num_items;
  table.num_items += (row.num_places + kTableItem - 1) / kTableItem;
}

// Raises the largest maxima of matrices, zero at first, to those of a thread's tiles.
MEGAFSDP_INLINE void raise_largest(const TableRow& row, int64_t item, int thread) {
  const int64_t first = (item - row.first_item) * kTableItem + thread;
  MEGAFSDP_UNROLL
  for (int i = 0; i < kPlacesOfThread; ++i) {
    const int64_t tile = first + i * kTableThreads;
    if (tile >= row.num_tiles) continue;
    raise(row.largest + tile / row.tiles_per_matrix, static_cast<uint32_t>(row.maxima[tile]));
  }
}

template <typename Element>
MEGAFSDP_INLINE void fill_places(const TableRow& row, ScalingKind scaling, int64_t item,
                                 int thread) {
  const int64_t first = (item - row.first_item) * kTableItem + thread;
  MEGAFSDP_ROLL
  for (int i = 0; i < kPlacesOfThread; ++i) {
    int64_t place = first + i * kTableThreads;
    if (place < row.num_tiles) {
      const uint32_t* const largest =
          row.largest == nullptr ? nullptr : row.largest + place / row.tiles_per_matrix;
      const auto maximum = static_cast<uint32_t>(row.maxima[place]);
      write_entry<Element>(scaling, maximum, largest, row.entries, place);
      continue;
    }
    if (place >= row.num_places) break;
    place -= row.num_tiles;
    const int64_t num_matrices =
        row.of_matrices == nullptr ? 0 : row.num_tiles / row.tiles_per_matrix;
    if (place < num_matrices) {
      row.of_matrices[place] = TwoLevelScaling::matrix_entry(row.largest[place]);
    } else {
      row.padding[place - num_matrices] = 0;
    }
  }
}

}  // namespace megafsdp
