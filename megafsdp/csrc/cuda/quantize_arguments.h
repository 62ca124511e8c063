// Arguments of launches on tiles and codes as they come from Python, checked; on top of what
// ops/quantize_arguments.h checks for all processors.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../ops/quantize_arguments.h"
#include "block_thread.h"
#include "encode_transposed_thread.h"
#include "quantize.h"

namespace megafsdp {

// A matrix that is encoded in one pass; codes, transposed codes, both maxima and the table may be
// null.
struct MatrixArguments {
  TileCodingArguments coding;
  StackShape shape;
  BufferArguments values;
  std::string dtype;
  BufferArguments codes;
  BufferArguments transposed;
  BufferArguments maximum;
  BufferArguments table;
};

struct TransposeArguments {
  std::string element;
  StackShape shape;
  BufferArguments codes;
  BufferArguments transposed;
};

// For kernels that do not lay out a matrix anew, and number its rows and columns in 32 bits.
inline void check_matrix_lines(const TileGrid& grid) {
  check(grid.num_matrices * grid.rows < kMostLines && grid.cols < kMostLines,
        "shape: expected fewer than 2**31 rows and columns");
}

inline void check_lines(const TileGrid& grid) {
  check(has_lines_in_range(grid), "shape: expected fewer than 2**31 rows and columns, got " +
                                      std::to_string(grid.num_matrices * grid.rows) + ", " +
                                      std::to_string(grid.cols));
}

inline std::vector<TileFragment> checked_fragments(const TileArguments& arguments,
                                                   bool writes_codes) {
  std::vector<TileFragment> fragments = tile_fragments_of(arguments, writes_codes);
  for (const TileFragment& fragment : fragments) check_lines(fragment.grid);
  return fragments;
}

inline std::vector<ScaleTable> checked_tables(const TileCodingArguments& coding,
                                              const std::vector<TableArguments>& arguments) {
  return scale_tables_of(coding, arguments);
}

inline ScaleTable checked_decode(const DecodeArguments& arguments) {
  const ScaleTable table = check_decode(arguments);
  check_lines(table.grid);
  return table;
}

inline int64_t num_matrices_of(const TileArguments& arguments) {
  int64_t count = 0;
  for (const FragmentArguments& fragment : arguments.fragments) {
    count += std::get<0>(std::get<2>(fragment));
  }
  return count;
}

inline int64_t num_matrices_of(const std::vector<TableArguments>& arguments) {
  int64_t count = 0;
  for (const TableArguments& table : arguments) count += std::get<0>(std::get<0>(table));
  return count;
}

// Checks the room that two levels need for the largest maximum of each matrix.
inline uint32_t* checked_largest(const TileCodingArguments& coding, const BufferArguments& largest,
                                 int64_t num_matrices) {
  const bool has_two_levels = scaling_of(coding.scaling) == ScalingKind::kTwoLevel;
  memory_of("largest", largest, has_two_levels ? num_matrices : 0, 4, true);
  return reinterpret_cast<uint32_t*>(std::get<0>(largest));
}

// Whether a matrix is encoded in one pass.
inline bool is_one_pass(const TileCodingArguments& coding) {
  const bool is_float8 = element_of(coding.element) != ElementKind::kE2M1;
  const bool has_one_level = scaling_of(coding.scaling) != ScalingKind::kTwoLevel;
  const bool is_row = coding.tile_rows == 1 && is_block_width(coding.tile_cols);
  const bool is_col = coding.tile_cols == 1 && is_block_height(coding.tile_rows);
  return is_float8 && has_one_level && (is_row || is_col);
}

inline bool is_null(const BufferArguments& buffer) { return std::get<0>(buffer) == 0; }

inline CudaMatrixLaunch checked_matrix(const MatrixArguments& arguments, const CudaTarget& target) {
  const TileGrid grid = grid_of(arguments.coding, arguments.shape);
  check_matrix_lines(grid);
  const ElementKind element = element_of(arguments.coding.element);
  const ScalingKind scaling = scaling_of(arguments.coding.scaling);
  check(element != ElementKind::kE2M1, "element: expected one of 8 bits, got e2m1");
  check(scaling != ScalingKind::kTwoLevel, "scaling: expected one level, got two_level");
  const bool is_given = !is_null(arguments.maximum), is_row = grid.tile_rows == 1 && !is_given;
  if (is_given) {
    check(arguments.coding.tile_rows == 0, "tile: expected the matrix beside a maximum");
    check(is_null(arguments.table), "table: expected null beside a maximum");
  } else {
    check(is_one_pass(arguments.coding),
          "tile: expected 8 to 256 columns of a row or 16 to 128 rows of a column, a power of two");
  }
  check(is_row || grid.num_matrices == 1, "shape: expected one matrix");
  check(!is_row || is_null(arguments.transposed),
        "transposed: expected null beside tiles of one row");
  check(!is_null(arguments.codes) || !is_null(arguments.transposed),
        "codes, transposed: expected one or both");
  const int64_t numel = grid.num_matrices * grid.rows * grid.cols;
  std::vector<MemoryRange> memory;
  memory.push_back(memory_of("values", arguments.values, numel,
                             itemsize_of_name("dtype", arguments.dtype), false));
  const auto add = [&](const char* name, const BufferArguments& buffer, int64_t count,
                       int64_t itemsize, bool is_written) {
    if (!is_null(buffer)) memory.push_back(memory_of(name, buffer, count, itemsize, is_written));
  };
  add("codes", arguments.codes, numel, 1, true);
  add("transposed", arguments.transposed, numel, 1, true);
  add("maximum", arguments.maximum, 1, 4, false);
  void* entries = nullptr;
  if (!is_given) {
    entries = scale_table_of(scaling, grid, 0, arguments.table).entries;
    add("table", arguments.table, std::get<1>(arguments.table), 1, true);
  }
  check_disjoint(std::move(memory));
  return {grid,
          reinterpret_cast<const void*>(std::get<0>(arguments.values)),
          reinterpret_cast<uint8_t*>(std::get<0>(arguments.codes)),
          reinterpret_cast<uint8_t*>(std::get<0>(arguments.transposed)),
          reinterpret_cast<const int32_t*>(std::get<0>(arguments.maximum)),
          entries,
          element,
          scaling,
          dtype_of(arguments.dtype),
          target};
}

inline CudaTransposeLaunch checked_transpose(const TransposeArguments& arguments,
                                             const CudaTarget& target) {
  const TileGrid grid = grid_of({arguments.element, "", 0, 0}, arguments.shape);
  check_matrix_lines(grid);
  const int64_t per_byte = codes_per_byte(element_of(arguments.element));
  check(grid.rows % per_byte == 0,
        "shape: expected an even number of rows beside e2m1, got " + std::to_string(grid.rows));
  const int64_t nbytes = grid.num_matrices * grid.rows * grid.cols / per_byte;
  check_disjoint({memory_of("codes", arguments.codes, nbytes, 1, false),
                  memory_of("transposed", arguments.transposed, nbytes, 1, true)});
  return {grid.num_matrices,
          grid.rows,
          grid.cols,
          reinterpret_cast<const uint8_t*>(std::get<0>(arguments.codes)),
          reinterpret_cast<uint8_t*>(std::get<0>(arguments.transposed)),
          static_cast<int>(per_byte),
          target};
}

}  // namespace megafsdp
