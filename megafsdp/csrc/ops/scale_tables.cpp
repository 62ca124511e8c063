#include <cstring>

#include "quantize.h"
#include "tile_ranges.h"

namespace megafsdp {
namespace {

// Number of tiles in one range of a table.
constexpr int64_t kRangeTiles = 1 << 14;

// Tiles of one matrix that one thread works on.
struct TableRange {
  size_t stack;
  int64_t matrix;
  int64_t first_tile;
  int64_t end_tile;
};

}  // namespace

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

}  // namespace megafsdp
