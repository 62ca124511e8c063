// Arguments of the kernels on tiles as they come from Python, checked and converted to the kernels'
// own types. The checks are the same for a CPU and for CUDA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "../kernels/scales.h"
#include "../kernels/tile_buffers.h"
#include "adam_arguments.h"
#include "arguments.h"

namespace megafsdp {

// The element (e4m3, e5m2 or e2m1), the kind of scale (fp32, power_of_two, e8m0 or two_level), and
// the rows and columns of a tile, both 0 if a matrix is one tile.
struct TileCodingArguments {
  std::string element;
  std::string scaling;
  int64_t tile_rows;
  int64_t tile_cols;
};

// Matrices, rows, columns.
using StackShape = std::tuple<int64_t, int64_t, int64_t>;

// Address and number of elements.
using BufferArguments = std::tuple<uintptr_t, int64_t>;

// Rows of a stack: their values, the first row, the stack's shape, the maxima of all its tiles, and
// the codes of the rows, null if they are not wanted.
using FragmentArguments =
    std::tuple<BufferArguments, int64_t, StackShape, BufferArguments, BufferArguments>;

// Shape, maxima and table of a stack.
using TableArguments = std::tuple<StackShape, BufferArguments, BufferArguments>;

// A batch of fragments of one type; through is a type to round to first, or empty. noise has one
// fp32 number for each value of a single fragment, and may be null.
struct TileArguments {
  TileCodingArguments coding;
  std::vector<FragmentArguments> fragments;
  std::string dtype;
  std::string through;
  BufferArguments noise;
};

struct DecodeArguments {
  TileCodingArguments coding;
  StackShape shape;
  BufferArguments codes;
  BufferArguments table;
  BufferArguments out;
  std::string out_dtype;
};

struct BlockArguments {
  TileCodingArguments coding;
  StackShape shape;
  BufferArguments values;
  std::string dtype;
  BufferArguments table;
  BufferArguments codes;
};

// The widest tile that is narrower than a row; the widths of all such tiles divide it.
constexpr int64_t kMostTileCols = 1024;
constexpr int64_t kTableAlignmentNbytes = 16;

inline ElementKind element_of(const std::string& name) {
  if (name == "e4m3") return ElementKind::kE4M3;
  if (name == "e5m2") return ElementKind::kE5M2;
  check(name == "e2m1", "element: expected e4m3, e5m2 or e2m1, got " + name);
  return ElementKind::kE2M1;
}

inline ScalingKind scaling_of(const std::string& name) {
  if (name == "fp32") return ScalingKind::kFp32;
  if (name == "power_of_two") return ScalingKind::kPowerOfTwo;
  if (name == "e8m0") return ScalingKind::kE8M0;
  check(name == "two_level", "scaling: expected fp32, power_of_two, e8m0 or two_level, got " + name);
  return ScalingKind::kTwoLevel;
}

inline int64_t codes_per_byte(ElementKind element) {
  return element == ElementKind::kE2M1 ? 2 : 1;
}

inline int64_t entry_nbytes(ScalingKind scaling) {
  return scaling == ScalingKind::kFp32 || scaling == ScalingKind::kPowerOfTwo ? 4 : 1;
}

// Bytes of a table before the entries of its tiles.
inline int64_t table_header_nbytes(ScalingKind scaling, const TileGrid& grid) {
  return scaling == ScalingKind::kTwoLevel ? 4 * grid.num_matrices : 0;
}

inline int64_t table_nbytes(ScalingKind scaling, const TileGrid& grid) {
  return table_header_nbytes(scaling, grid) + entry_nbytes(scaling) * grid.num_tiles();
}

// A shape without elements has no tiles.
inline TileGrid grid_of(const TileCodingArguments& coding, const StackShape& shape) {
  const auto& [matrices, rows, cols] = shape;
  int64_t numel = 0, total_rows = 0;
  check(matrices > 0 && rows > 0 && cols > 0 &&
            !__builtin_mul_overflow(matrices, rows, &total_rows) &&
            !__builtin_mul_overflow(total_rows, cols, &numel) && numel < int64_t{1} << 60,
        "shape: expected positive matrices, rows and columns, got " + std::to_string(matrices) +
            ", " + std::to_string(rows) + ", " + std::to_string(cols));
  const bool is_whole = coding.tile_rows == 0 && coding.tile_cols == 0;
  check(is_whole || (coding.tile_rows > 0 && coding.tile_cols > 0),
        "tile: expected positive rows and columns, or 0 and 0");
  const TileGrid grid{matrices, rows, cols, is_whole ? rows : coding.tile_rows,
                      is_whole ? cols : coding.tile_cols};
  check(grid.is_one_across() || kMostTileCols % grid.tile_cols == 0,
        "tile: expected columns that divide " + std::to_string(kMostTileCols) + ", got " +
            std::to_string(grid.tile_cols));
  check(element_of(coding.element) != ElementKind::kE2M1 || cols % 2 == 0,
        "shape: expected an even number of columns beside e2m1, got " + std::to_string(cols));
  return grid;
}

// The memory of one argument.
struct MemoryRange {
  uintptr_t begin;
  uintptr_t end;
  const char* argument;
  bool is_written;
};

// Checks a buffer, and returns its memory. A buffer without elements may be anywhere.
inline MemoryRange memory_of(const char* argument, const BufferArguments& buffer, int64_t numel,
                             int64_t itemsize, bool is_written) {
  const auto& [address, found] = buffer;
  check(found == numel, std::string(argument) + ": expected " + std::to_string(numel) +
                            " elements, got " + std::to_string(found));
  if (numel == 0) return {0, 0, argument, is_written};
  check_address(argument, address, static_cast<uintptr_t>(itemsize));
  return {address, address + static_cast<uintptr_t>(numel * itemsize), argument, is_written};
}

// Throws if memory that is written overlaps other memory; maxima may be the same for several
// fragments of one tensor.
inline void check_disjoint(std::vector<MemoryRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const MemoryRange& a, const MemoryRange& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  uintptr_t end_of_any = 0, end_of_written = 0;
  const MemoryRange* last = nullptr;
  for (const MemoryRange& range : ranges) {
    if (range.begin == range.end) continue;
    const bool is_same = last != nullptr && last->argument == range.argument &&
                         last->begin == range.begin && last->end == range.end &&
                         std::string(range.argument) == "maxima";
    check(is_same || range.begin >= (range.is_written ? end_of_any : end_of_written),
          std::string(range.argument) + ": expected memory that overlaps no other argument's");
    end_of_any = std::max(end_of_any, range.end);
    if (range.is_written) end_of_written = std::max(end_of_written, range.end);
    last = &range;
  }
}

inline int64_t itemsize_of_name(const char* argument, const std::string& dtype) {
  const Dtype found = dtype_of(dtype);
  check(found != Dtype::kNone, std::string(argument) +
                                   ": expected float32, bfloat16 or float16, got " + dtype);
  return static_cast<int64_t>(itemsize_of(found));
}

// Checks a batch, and returns its fragments that have elements.
inline std::vector<TileFragment> tile_fragments_of(const TileArguments& arguments,
                                                   bool writes_codes) {
  const ElementKind element = element_of(arguments.coding.element);
  scaling_of(arguments.coding.scaling);
  const int64_t itemsize = itemsize_of_name("dtype", arguments.dtype);
  check(arguments.through.empty() || arguments.through == arguments.dtype ||
            (arguments.dtype == "float32" && dtype_of(arguments.through) != Dtype::kNone),
        "through: expected a 16-bit type beside float32 or none, got " + arguments.through);
  std::vector<TileFragment> fragments;
  std::vector<MemoryRange> memory;
  for (const auto& [values, first_row, shape, maxima, codes] : arguments.fragments) {
    const TileGrid grid = grid_of(arguments.coding, shape);
    const int64_t numel = std::get<1>(values), num_rows = numel / grid.cols;
    check(numel >= 0 && numel % grid.cols == 0,
          "values: expected whole rows of " + std::to_string(grid.cols) + " elements, got " +
              std::to_string(numel));
    check(first_row >= 0 && first_row <= grid.num_matrices * grid.rows - num_rows,
          "first_row: expected rows within " + std::to_string(grid.num_matrices * grid.rows) +
              ", got " + std::to_string(first_row) + " and " + std::to_string(num_rows) + " more");
    memory.push_back(memory_of("values", values, numel, itemsize, false));
    memory.push_back(memory_of("maxima", maxima, grid.num_tiles(), 4, !writes_codes));
    if (writes_codes) {
      memory.push_back(memory_of("codes", codes, numel / codes_per_byte(element), 1, true));
    }
    if (num_rows == 0) continue;
    fragments.push_back({grid, reinterpret_cast<const void*>(std::get<0>(values)), first_row,
                         num_rows, reinterpret_cast<int32_t*>(std::get<0>(maxima)),
                         reinterpret_cast<uint8_t*>(std::get<0>(codes))});
  }
  if (std::get<0>(arguments.noise) != 0) {
    check(element == ElementKind::kE2M1, "noise: expected null beside an 8-bit element");
    check(arguments.fragments.size() == 1, "noise: expected null beside several fragments");
    const int64_t numel = std::get<1>(std::get<0>(arguments.fragments[0]));
    memory.push_back(memory_of("noise", arguments.noise, numel, 4, false));
  }
  check_disjoint(std::move(memory));
  return fragments;
}

// Returns the parts of a table, which may have bytes beyond its entries.
inline ScaleTable scale_table_of(ScalingKind scaling, const TileGrid& grid, uintptr_t maxima,
                                 const BufferArguments& table) {
  const int64_t nbytes = table_nbytes(scaling, grid), found = std::get<1>(table);
  check(found >= nbytes && found < nbytes + kTableAlignmentNbytes,
        "table: expected " + std::to_string(nbytes) + " bytes and padding, got " +
            std::to_string(found));
  const uintptr_t address = std::get<0>(table);
  const bool has_fp32 = scaling != ScalingKind::kE8M0;
  check_address("table", address, has_fp32 ? 4 : 1);
  const bool has_two_levels = scaling == ScalingKind::kTwoLevel;
  const auto header = static_cast<uintptr_t>(table_header_nbytes(scaling, grid));
  return {grid,
          reinterpret_cast<const int32_t*>(maxima),
          has_two_levels ? reinterpret_cast<float*>(address) : nullptr,
          reinterpret_cast<void*>(address + header),
          reinterpret_cast<uint8_t*>(address + static_cast<uintptr_t>(nbytes)),
          found - nbytes};
}

// Checks a batch of tables, and returns them.
inline std::vector<ScaleTable> scale_tables_of(const TileCodingArguments& coding,
                                               const std::vector<TableArguments>& arguments) {
  const ScalingKind scaling = scaling_of(coding.scaling);
  std::vector<ScaleTable> tables;
  std::vector<MemoryRange> memory;
  for (const auto& [shape, maxima, table] : arguments) {
    const TileGrid grid = grid_of(coding, shape);
    memory.push_back(memory_of("maxima", maxima, grid.num_tiles(), 4, false));
    tables.push_back(scale_table_of(scaling, grid, std::get<0>(maxima), table));
    memory.push_back(memory_of("table", table, std::get<1>(table), 1, true));
  }
  check_disjoint(std::move(memory));
  return tables;
}

// Checks the arguments, and returns the table.
inline ScaleTable check_decode(const DecodeArguments& arguments) {
  const TileGrid grid = grid_of(arguments.coding, arguments.shape);
  const ElementKind element = element_of(arguments.coding.element);
  const int64_t itemsize = itemsize_of_name("out_dtype", arguments.out_dtype);
  const int64_t numel = grid.num_matrices * grid.rows * grid.cols;
  const ScaleTable table =
      scale_table_of(scaling_of(arguments.coding.scaling), grid, 0, arguments.table);
  check_disjoint({memory_of("codes", arguments.codes, numel / codes_per_byte(element), 1, false),
                  memory_of("table", arguments.table, std::get<1>(arguments.table), 1, false),
                  memory_of("out", arguments.out, numel, itemsize, true)});
  return table;
}

// Checks the arguments, and returns the table.
inline ScaleTable check_blocks(const BlockArguments& arguments) {
  const TileGrid grid = grid_of(arguments.coding, arguments.shape);
  const ElementKind element = element_of(arguments.coding.element);
  const ScalingKind scaling = scaling_of(arguments.coding.scaling);
  check(scaling != ScalingKind::kTwoLevel, "scaling: expected one level, got two_level");
  check(element != ElementKind::kE2M1, "element: expected 8 bits, got e2m1");
  // Threads take whole rows of tiles and do not share the maximum of a tile; neither do the parts
  // that a wider row would be cut into.
  const int64_t tile_rows = arguments.coding.tile_rows, tile_cols = arguments.coding.tile_cols;
  check((tile_rows == 1 || tile_cols == 1) && std::max(tile_rows, tile_cols) <= kMostTileCols,
        "tile: expected one row or one column of " + std::to_string(kMostTileCols) +
            " elements at most");
  const int64_t itemsize = itemsize_of_name("dtype", arguments.dtype);
  const int64_t numel = grid.num_matrices * grid.rows * grid.cols;
  const ScaleTable table = scale_table_of(scaling, grid, 0, arguments.table);
  check_disjoint({memory_of("values", arguments.values, numel, itemsize, false),
                  memory_of("table", arguments.table, std::get<1>(arguments.table), 1, true),
                  memory_of("codes", arguments.codes, numel / codes_per_byte(element), 1, true)});
  return table;
}

}  // namespace megafsdp
