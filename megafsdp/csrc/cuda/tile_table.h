// The fragments of a launch on tiles, and which elements of them a thread has.
//
// Tables are arguments of launches; fragments without room go with the next launch. All fragments
// of a table share its blocks. Each block takes an item: some rows of some columns. A thread has
// eight neighbours in each of up to eight rows, so that its work for a tile serves many values:
//
//   cols 8 * 256 and more      panels of up to 256 threads side by side, one row at a time
//   cols 8 * 64                64 threads side by side, 4 rows at a time:
//
//     row 0, 4, 8 ...   thread   0   1   2  ..  63
//     row 1, 5, 9 ...           64  65  66  .. 127
//
// A matrix that is one tile is a run of elements: its rows do not matter. It is laid out anew in
// rows of a length that suits vectors; only the last row may be short.
//
// The file compiles for the host too, where a test makes the tables and runs all threads in turn.
#pragma once

#include <cstdint>

#include "../kernels/scales.h"
#include "../kernels/tile_buffers.h"
#include "code_vectors.h"

namespace megafsdp {

constexpr int kTileThreads = 256;
constexpr uint32_t kRowsOfThread = 8;
constexpr int64_t kRunCols = kTileThreads * kNeighbours;
// Rows and columns have 32 bits: a GPU needs hundreds of instructions to divide 64-bit numbers.
constexpr int64_t kMostLines = INT64_C(1) << 31;

// Together below the 4 KB that arguments of a kernel may have.
constexpr int kMostFragments = 32;

// A fragment. from and to are values and codes, or codes and values; tiles are maxima, or entries
// of a table.
struct FragmentRow {
  const void* from;
  void* to;
  void* tiles;
  // For two levels: the largest maximum of each matrix, or its entry in the table.
  const void* of_matrices;
  const float* noise;
  int64_t first_item;
  int64_t numel;
  int64_t tiles_per_matrix;
  uint32_t first_row;
  uint32_t num_rows;
  // Sizes of one matrix.
  uint32_t rows;
  uint32_t cols;
  uint32_t tile_rows;
  uint32_t tile_cols;
  uint32_t tiles_across;
  // Threads side by side, and the number of such panels.
  uint32_t panel;
  uint32_t num_panels;
  bool is_aligned;
};

struct FragmentTable {
  FragmentRow rows[kMostFragments];
  int count = 0;
  int64_t num_items = 0;
};

// Whether a matrix is one tile, so that its rows do not matter.
inline bool is_run(const TileGrid& grid) {
  return grid.num_matrices == 1 && grid.tile_rows >= grid.rows && grid.is_one_across();
}

inline bool has_lines_in_range(const TileGrid& grid) {
  if (is_run(grid)) return grid.rows * grid.cols / kRunCols < kMostLines;
  return grid.num_matrices * grid.rows < kMostLines && grid.cols < kMostLines;
}

// Lays out the elements of a fragment; the caller sets its buffers.
inline FragmentRow laid_out(const TileGrid& grid, int64_t first_row, int64_t num_rows) {
  FragmentRow row{};
  row.numel = num_rows * grid.cols;
  const bool is_laid_anew = is_run(grid);
  const int64_t whole = (row.numel + kNeighbours - 1) / kNeighbours * kNeighbours;
  const int64_t cols = !is_laid_anew ? grid.cols : (whole < kRunCols ? whole : kRunCols);
  const int64_t rows = is_laid_anew ? (row.numel + cols - 1) / cols : grid.rows;
  const auto narrow = [](int64_t value) { return static_cast<uint32_t>(value); };
  row.tiles_per_matrix = grid.tiles_per_matrix();
  row.first_row = narrow(is_laid_anew ? 0 : first_row);
  row.num_rows = narrow(is_laid_anew ? rows : num_rows);
  row.rows = narrow(rows);
  row.cols = narrow(cols);
  row.tile_rows = narrow(is_laid_anew || grid.tile_rows > rows ? rows : grid.tile_rows);
  row.tile_cols = narrow(is_laid_anew || grid.tile_cols > cols ? cols : grid.tile_cols);
  row.tiles_across = narrow(grid.tiles_across());
  const int64_t vectors = (cols + kNeighbours - 1) / kNeighbours;
  row.num_panels = narrow((vectors + kTileThreads - 1) / kTileThreads);
  row.panel = narrow((vectors + row.num_panels - 1) / row.num_panels);
  return row;
}

MEGAFSDP_INLINE uint32_t rows_at_once(const FragmentRow& row) { return kTileThreads / row.panel; }

// Adds a fragment to a table that has room, and gives it its items.
inline void add_row(const FragmentRow& row, FragmentTable& table) {
  const int64_t rows_of_item = int64_t{kRowsOfThread} * rows_at_once(row);
  const int64_t groups = (row.num_rows + rows_of_item - 1) / rows_of_item;
  table.rows[table.count] = row;
  table.rows[table.count++].first_item = table.num_items;
  table.num_items += groups * row.num_panels;
}

// Returns the row of a table that an item belongs to.
template <typename Table>
MEGAFSDP_INLINE const auto& row_of_item(const Table& table, int64_t item) {
  int first = 0;
  for (int last = table.count; last - first > 1;) {
    const int middle = first + (last - first) / 2;
    if (table.rows[middle].first_item <= item) {
      first = middle;
    } else {
      last = middle;
    }
  }
  return table.rows[first];
}

// The rows [row, end) of a fragment, in steps, and the first of eight columns.
struct ThreadRows {
  uint32_t row;
  uint32_t end;
  uint32_t step;
  uint32_t col;
};

MEGAFSDP_INLINE ThreadRows rows_of_thread(const FragmentRow& f, int64_t item, int thread) {
  const auto number = static_cast<uint64_t>(item - f.first_item);
  const auto group = static_cast<uint32_t>(number / f.num_panels);
  const auto panel = static_cast<uint32_t>(number - uint64_t{group} * f.num_panels);
  const uint32_t step = rows_at_once(f), lane = static_cast<uint32_t>(thread) / f.panel;
  const uint32_t vector = panel * f.panel + static_cast<uint32_t>(thread) - lane * f.panel;
  const uint32_t start = group * kRowsOfThread * step, stop = start + kRowsOfThread * step;
  const uint32_t end = stop < f.num_rows ? stop : f.num_rows;
  const bool has_none = lane >= step || vector >= (f.cols + kNeighbours - 1) / kNeighbours;
  return {has_none ? end : start + lane, end, step, vector * kNeighbours};
}

// Rows that lie in one row of tiles: the first row after them, and the place of the tiles.
struct RowOfTiles {
  uint32_t end;
  uint32_t matrix;
  int64_t first_tile;
};

MEGAFSDP_INLINE RowOfTiles row_of_tiles(const FragmentRow& f, uint32_t row) {
  const uint32_t of_stack = f.first_row + row;
  const uint32_t matrix = of_stack / f.rows;
  const uint32_t number = (of_stack - matrix * f.rows) / f.tile_rows;
  const uint32_t next = (number + 1) * f.tile_rows;
  const uint32_t end = matrix * f.rows + (next < f.rows ? next : f.rows);
  return {end - f.first_row, matrix,
          matrix * f.tiles_per_matrix + int64_t{number} * f.tiles_across};
}

// Calls visit(tiles, row, count) for the runs of a thread's rows in one row of tiles.
template <typename Visit>
MEGAFSDP_INLINE void for_each_row_of_tiles(const FragmentRow& f, const ThreadRows& rows,
                                           const Visit& visit) {
  MEGAFSDP_ROLL
  for (uint32_t row = rows.row; row < rows.end;) {
    const RowOfTiles tiles = row_of_tiles(f, row);
    const uint32_t stop = tiles.end < rows.end ? tiles.end : rows.end;
    const uint32_t count = (stop - row + rows.step - 1) / rows.step;
    visit(tiles, row, count);
    row += count * rows.step;
  }
}

// Whether all neighbours are in one tile; otherwise each may be in a different one.
MEGAFSDP_INLINE bool share_tile(const FragmentRow& f) {
  return f.tile_cols % kNeighbours == 0 || f.tile_cols >= f.cols;
}

// Elements of a row that a thread has: eight, fewer at the end of a row or of a run, or none.
MEGAFSDP_INLINE int neighbours_at(const FragmentRow& f, uint32_t row, uint32_t col) {
  const int64_t left = f.numel - (int64_t{row} * f.cols + col);
  const int64_t of_row = f.cols - col;
  const int64_t count = left < of_row ? left : of_row;
  return count < kNeighbours ? static_cast<int>(count) : kNeighbours;
}

}  // namespace megafsdp
