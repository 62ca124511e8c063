// What the passes of quantize.h share: which thread works on which rows, and types by their names.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "../kernels/simd.h"
#include "../kernels/threads.h"
#include "../kernels/tiles.h"
#include "dtypes.h"
#include "quantize_arguments.h"

namespace megafsdp {

static_assert(kPanelCols % kMostTileCols == 0, "panels begin where tiles do");

// Rows of one stack that one thread works on: whole rows of tiles, unless the fragment cuts one, or
// the tile is a whole matrix, whose maximum each part raises.
struct WorkRange {
  size_t stack;
  int64_t first_row;
  int64_t end_row;
};

inline void cut_rows(const TileGrid& grid, size_t stack, int64_t first_row, int64_t end_row,
                     std::vector<WorkRange>& ranges) {
  const int64_t wished = (kMinRangeNumel + grid.cols - 1) / grid.cols;
  const int64_t unit = grid.is_one_across() && grid.tile_rows == grid.rows ? 1 : grid.tile_rows;
  const int64_t num_rows = (wished + unit - 1) / unit * unit;
  for (int64_t row = first_row; row < end_row;) {
    // Each matrix begins with a new tile, whatever the number of rows before it.
    const int64_t matrix_row = row % grid.rows;
    const int64_t left = grid.rows - matrix_row;
    const int64_t to_next = num_rows - matrix_row % unit;
    const int64_t count = std::min({to_next, left, end_row - row});
    ranges.push_back({stack, row, row + count});
    row += count;
  }
}

// Calls work(range) for all ranges over threads, with subnormal numbers computed.
template <typename Range, typename Work>
void for_ranges(const std::vector<Range>& ranges, int64_t numel, int64_t num_threads,
                const Work& work) {
  const int64_t used = numel < 2 * kMinRangeNumel ? 1 : num_threads;
  parallel_ranges(static_cast<int64_t>(ranges.size()), 1, 1, used,
                  [&](int64_t first, int64_t last) {
                    const DenormalMode mode(false);
                    for (int64_t i = first; i < last; ++i) work(ranges[static_cast<size_t>(i)]);
                  });
}

template <typename Visit>
void visit_byte_element(const std::string& name, const Visit& visit) {
  element_of(name) == ElementKind::kE4M3 ? visit(E4M3{}) : visit(E5M2{});
}

template <typename Visit>
void visit_element(const std::string& name, const Visit& visit) {
  if (element_of(name) == ElementKind::kE2M1) return visit(E2M1{});
  visit_byte_element(name, visit);
}

// Calls visit(type of values, type to round to).
template <typename Visit>
void visit_source(const TileArguments& arguments, const Visit& visit) {
  if (arguments.through.empty() || arguments.through == arguments.dtype) {
    visit_dtype(arguments.dtype, [&](auto source) { visit(source, NoRounding{}); });
  } else if (arguments.through == "bfloat16") {
    visit(float{}, BFloat16{});
  } else {
    visit(float{}, Float16{});
  }
}

inline std::vector<WorkRange> ranges_of(const std::vector<TileFragment>& fragments,
                                        int64_t& numel) {
  std::vector<WorkRange> ranges;
  numel = 0;
  for (size_t i = 0; i < fragments.size(); ++i) {
    const TileFragment& fragment = fragments[i];
    const int64_t end_row = fragment.first_row + fragment.num_rows;
    cut_rows(fragment.grid, i, fragment.first_row, end_row, ranges);
    numel += fragment.num_rows * fragment.grid.cols;
  }
  return ranges;
}

// A matrix of a stack.
struct MatrixOf {
  size_t stack;
  int64_t matrix;
};

// Returns, for each stack and matrix, the largest of its maxima; stacks have grid and maxima.
template <typename Stack>
std::vector<std::vector<uint32_t>> largest_of(const std::vector<Stack>& stacks, int64_t num_threads,
                                              Simd level) {
  std::vector<std::vector<uint32_t>> largest(stacks.size());
  std::vector<MatrixOf> matrices;
  int64_t num_tiles = 0;
  for (size_t i = 0; i < stacks.size(); ++i) {
    largest[i].resize(static_cast<size_t>(stacks[i].grid.num_matrices));
    num_tiles += stacks[i].grid.num_tiles();
    for (int64_t k = 0; k < stacks[i].grid.num_matrices; ++k) matrices.push_back({i, k});
  }
  for_ranges(matrices, num_tiles, num_threads, [&](const MatrixOf& of) {
    const Stack& stack = stacks[of.stack];
    const int64_t count = stack.grid.tiles_per_matrix();
    run_at(level, LargestJob{stack.maxima + of.matrix * count, count,
                             &largest[of.stack][static_cast<size_t>(of.matrix)]});
  });
  return largest;
}

}  // namespace megafsdp
