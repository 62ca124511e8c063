#include "quantize.h"

#include <cstring>

#include "../kernels/threads.h"
#include "../kernels/tiles.h"
#include "dtypes.h"

namespace megafsdp {
namespace {

static_assert(kPanelCols % kMostTileCols == 0, "panels begin where tiles do");

// Tiles of which one range of a table consists.
constexpr int64_t kRangeTiles = 1 << 14;

// Rows of one stack that one thread works on: whole rows of tiles, but where the fragment cuts one,
// or where the tile is a whole matrix whose parts each raise its maximum.
struct WorkRange {
  size_t stack;
  int64_t first_row;
  int64_t end_row;
};

void cut_rows(const TileGrid& grid, size_t stack, int64_t first_row, int64_t end_row,
              std::vector<WorkRange>& ranges) {
  const int64_t wished = (kMinRangeNumel + grid.cols - 1) / grid.cols;
  const int64_t unit = grid.is_one_across() && grid.tile_rows == grid.rows ? 1 : grid.tile_rows;
  const int64_t num_rows = (wished + unit - 1) / unit * unit;
  for (int64_t row = first_row; row < end_row;) {
    // Matrices begin with a tile, whatever the rows of those before.
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

std::vector<WorkRange> ranges_of(const std::vector<TileFragment>& fragments, int64_t& numel) {
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
std::vector<std::vector<uint32_t>> largest_of(const std::vector<Stack>& stacks,
                                              int64_t num_threads, Simd level) {
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

// Tiles of one matrix that one thread works on.
struct TableRange {
  size_t stack;
  int64_t matrix;
  int64_t first_tile;
  int64_t end_tile;
};

}  // namespace

void run_tile_maxima(const TileArguments& arguments, const std::vector<TileFragment>& fragments,
                     int64_t num_threads, Simd level) {
  int64_t numel = 0;
  const std::vector<WorkRange> ranges = ranges_of(fragments, numel);
  visit_source(arguments, [&](auto source, auto through) {
    using Source = decltype(source);
    for_ranges(ranges, numel, num_threads, [&](const WorkRange& range) {
      const TileFragment& of = fragments[range.stack];
      run_at(level, MaximaJob<Source, decltype(through)>{
                        {of.grid, of.first_row, range.first_row, range.end_row},
                        static_cast<const Source*>(of.values),
                        of.maxima});
    });
  });
}

void run_encode(const TileArguments& arguments, const std::vector<TileFragment>& fragments,
                int64_t num_threads, Simd level) {
  int64_t numel = 0;
  const std::vector<WorkRange> ranges = ranges_of(fragments, numel);
  const ScalingKind scaling = scaling_of(arguments.coding.scaling);
  std::vector<std::vector<float>> of_matrices(fragments.size());
  if (scaling == ScalingKind::kTwoLevel) {
    const auto largest = largest_of(fragments, num_threads, level);
    const DenormalMode mode(false);
    for (size_t i = 0; i < fragments.size(); ++i) {
      for (uint32_t bits : largest[i]) {
        of_matrices[i].push_back(TwoLevelScaling::matrix_factor(bits));
      }
    }
  }
  const auto* const noise = reinterpret_cast<const float*>(std::get<0>(arguments.noise));
  visit_element(arguments.coding.element, [&](auto element) {
    visit_source(arguments, [&](auto source, auto through) {
      using Source = decltype(source);
      const EncodeMode mode{level, numel * static_cast<int64_t>(sizeof(Source)) > cached_nbytes()};
      for_ranges(ranges, numel, num_threads, [&](const WorkRange& range) {
        const TileFragment& of = fragments[range.stack];
        const std::vector<float>& factors = of_matrices[range.stack];
        run_at(level, EncodeJob<decltype(element), Source, decltype(through)>{
                          {of.grid, of.first_row, range.first_row, range.end_row},
                          static_cast<const Source*>(of.values),
                          noise,
                          of.maxima,
                          factors.empty() ? nullptr : factors.data(),
                          scaling,
                          of.codes,
                          mode});
      });
    });
  });
}

void run_scale_tables(const TileCodingArguments& coding, const std::vector<ScaleTable>& tables,
                      int64_t num_threads, Simd level) {
  const ScalingKind scaling = scaling_of(coding.scaling);
  const bool has_two_levels = scaling == ScalingKind::kTwoLevel;
  std::vector<std::vector<uint32_t>> largest;
  if (has_two_levels) largest = largest_of(tables, num_threads, level);
  std::vector<TableRange> ranges;
  int64_t num_tiles = 0;
  for (size_t i = 0; i < tables.size(); ++i) {
    const ScaleTable& table = tables[i];
    const int64_t count = table.grid.tiles_per_matrix();
    num_tiles += table.grid.num_tiles();
    std::memset(table.padding, 0, static_cast<size_t>(table.padding_nbytes));
    for (int64_t matrix = 0; matrix < table.grid.num_matrices; ++matrix) {
      for (int64_t tile = 0; tile < count; tile += kRangeTiles) {
        ranges.push_back({i, matrix, tile, std::min(tile + kRangeTiles, count)});
      }
    }
  }
  visit_element(coding.element, [&](auto element) {
    for_ranges(ranges, num_tiles, num_threads, [&](const TableRange& range) {
      const ScaleTable& table = tables[range.stack];
      float of_matrix = 0.0f;
      if (has_two_levels) {
        const uint32_t bits = largest[range.stack][static_cast<size_t>(range.matrix)];
        of_matrix = TwoLevelScaling::matrix_factor(bits);
        if (range.first_tile == 0) {
          table.of_matrices[range.matrix] = TwoLevelScaling::matrix_entry(bits);
        }
      }
      const int64_t first = range.matrix * table.grid.tiles_per_matrix() + range.first_tile;
      run_at(level, EntriesJob<decltype(element)>{
                        table.maxima + first, range.end_tile - range.first_tile, of_matrix, scaling,
                        static_cast<char*>(table.entries) + first * entry_nbytes(scaling)});
    });
  });
}

void run_decode(const DecodeArguments& arguments, const ScaleTable& table, int64_t num_threads,
                Simd level) {
  const int64_t num_rows = table.grid.num_matrices * table.grid.rows;
  std::vector<WorkRange> ranges;
  cut_rows(table.grid, 0, 0, num_rows, ranges);
  const auto* const codes = reinterpret_cast<const uint8_t*>(std::get<0>(arguments.codes));
  const ScalingKind scaling = scaling_of(arguments.coding.scaling);
  visit_element(arguments.coding.element, [&](auto element) {
    visit_dtype(arguments.out_dtype, [&](auto result) {
      using Out = decltype(result);
      auto* const out = reinterpret_cast<Out*>(std::get<0>(arguments.out));
      for_ranges(ranges, num_rows * table.grid.cols, num_threads, [&](const WorkRange& range) {
        run_at(level, DecodeJob<decltype(element), Out>{
                          {table.grid, 0, range.first_row, range.end_row},
                          codes,
                          table.entries,
                          table.of_matrices,
                          scaling,
                          out,
                          level});
      });
    });
  });
}

void run_blocks(const BlockArguments& arguments, const ScaleTable& table, int64_t num_threads,
                Simd level) {
  const int64_t num_rows = table.grid.num_matrices * table.grid.rows;
  std::vector<WorkRange> ranges;
  cut_rows(table.grid, 0, 0, num_rows, ranges);
  auto* const codes = reinterpret_cast<uint8_t*>(std::get<0>(arguments.codes));
  const ScalingKind scaling = scaling_of(arguments.coding.scaling);
  visit_byte_element(arguments.coding.element, [&](auto element) {
    visit_dtype(arguments.dtype, [&](auto source) {
      using Source = decltype(source);
      const auto* const values = reinterpret_cast<const Source*>(std::get<0>(arguments.values));
      for_ranges(ranges, num_rows * table.grid.cols, num_threads, [&](const WorkRange& range) {
        run_at(level, BlockJob<decltype(element), Source>{
                          {table.grid, 0, range.first_row, range.end_row},
                          values,
                          static_cast<uint8_t*>(table.entries),
                          entry_nbytes(scaling),
                          scaling,
                          codes,
                          level});
      });
    });
  });
}

}  // namespace megafsdp
