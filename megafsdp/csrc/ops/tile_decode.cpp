#include "quantize.h"
#include "tile_ranges.h"

namespace megafsdp {

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
        run_at(level,
               DecodeJob<decltype(element), Out>{{table.grid, 0, range.first_row, range.end_row},
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

}  // namespace megafsdp
