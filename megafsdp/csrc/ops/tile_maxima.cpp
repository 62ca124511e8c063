#include "quantize.h"
#include "tile_ranges.h"

namespace megafsdp {

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

}  // namespace megafsdp
