// What the kernels on tiles work on, for any processor.
#pragma once

#include <cstdint>

#include "tile_grid.h"

namespace megafsdp {

enum class ElementKind { kE4M3, kE5M2, kE2M1 };

// Rows of a stack that one call has, the maxima of all tiles of the stack, and the codes of the
// rows, which may be null.
struct TileFragment {
  TileGrid grid;
  const void* values;
  int64_t first_row;
  int64_t num_rows;
  int32_t* maxima;
  uint8_t* codes;
};

// A table and the maxima that it is made from; of_matrices is null except for two levels.
struct ScaleTable {
  TileGrid grid;
  const int32_t* maxima;
  float* of_matrices;
  void* entries;
  uint8_t* padding;
  int64_t padding_nbytes;
};

}  // namespace megafsdp
