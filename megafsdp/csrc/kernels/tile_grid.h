// Tiles over a stack of matrices, and the rows of the stack that one call has.
//
// Tiles are numbered by matrix, row of tiles and column of tiles; no tile spans two matrices. The
// last of a row or column may be cut short.
#pragma once

#include <cstdint>

#include "inline.h"

namespace megafsdp {

struct TileGrid {
  int64_t num_matrices;
  int64_t rows;
  int64_t cols;
  int64_t tile_rows;
  int64_t tile_cols;

  MEGAFSDP_INLINE int64_t tiles_down() const { return (rows + tile_rows - 1) / tile_rows; }
  MEGAFSDP_INLINE int64_t tiles_across() const { return (cols + tile_cols - 1) / tile_cols; }
  MEGAFSDP_INLINE int64_t tiles_per_matrix() const { return tiles_down() * tiles_across(); }
  MEGAFSDP_INLINE int64_t num_tiles() const { return num_matrices * tiles_per_matrix(); }

  // Whether the elements of a row share a tile, so that rows of a tile are one run of elements.
  MEGAFSDP_INLINE bool is_one_across() const { return tile_cols >= cols; }
};

// Rows that lie in one row of tiles.
struct Strip {
  // Rows are numbered in the whole stack.
  int64_t first_row;
  int64_t num_rows;
  int64_t matrix;
  // The first tile of the row of tiles.
  int64_t first_tile;
};

// Returns the strip that begins at a row of the stack and ends at another or before.
MEGAFSDP_INLINE Strip strip_at(const TileGrid& grid, int64_t row, int64_t end_row) {
  const int64_t matrix = row / grid.rows;
  const int64_t row_in_matrix = row - matrix * grid.rows;
  const int64_t tile_row = row_in_matrix / grid.tile_rows;
  const int64_t next_tile = (tile_row + 1) * grid.tile_rows;
  const int64_t end_in_matrix = next_tile < grid.rows ? next_tile : grid.rows;
  const int64_t end = matrix * grid.rows + end_in_matrix;
  return {row, (end < end_row ? end : end_row) - row, matrix,
          (matrix * grid.tiles_down() + tile_row) * grid.tiles_across()};
}

}  // namespace megafsdp
