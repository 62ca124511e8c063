#include "quantize.h"
#include "tile_ranges.h"

namespace megafsdp {

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
        run_at(level,
               BlockJob<decltype(element), Source>{{table.grid, 0, range.first_row, range.end_row},
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
