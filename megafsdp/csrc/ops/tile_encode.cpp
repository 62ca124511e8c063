#include "quantize.h"
#include "tile_ranges.h"

namespace megafsdp {

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

}  // namespace megafsdp
