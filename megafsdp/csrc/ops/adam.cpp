#include "adam.h"

#include "../kernels/adam.h"
#include "../kernels/square_sum.h"
#include "../kernels/stream.h"
#include "../kernels/threads.h"
#include "dtypes.h"

namespace megafsdp {
namespace {

// Ranges of threads are whole cache lines of every element type.
constexpr int64_t kGrainNumel = 1024;

// Software prefetch made a prototype faster on an Intel Xeon, but slows this kernel on an AMD Zen
// 4, whose own prefetchers follow all streams (docs/log.md).
bool gains_by_prefetching() {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

int64_t touched_nbytes(const AdamBuffers& job, int64_t numel) {
  const int64_t new_nbytes = job.new_weight == nullptr ? 0 : 12;
  return numel *
         (4 + itemsize_of(job.grad_dtype) + 2 * itemsize_of(job.state_dtype) + 2 + new_nbytes);
}

}  // namespace

void run_adam(const AdamArguments& arguments, int64_t num_threads, Simd level) {
  AdamBuffers job = buffers_of(arguments);
  const bool writes_elsewhere = job.copy_out_dtype != Dtype::kNone || job.new_weight != nullptr;
  job.streams = writes_elsewhere && touched_nbytes(job, arguments.numel) > cached_nbytes();
  static const bool gains = gains_by_prefetching();
  job.prefetches = gains;
  const std::vector<AdamSegment> segments = segments_of(arguments);
  parallel_ranges(arguments.numel, kGrainNumel, kMinRangeNumel, num_threads,
                  [&](int64_t start, int64_t stop) {
                    const DenormalMode mode(arguments.flush_denormals);
                    adam_at(level, job, segments, start, stop);
                  });
}

double run_square_sum(const SquareSumArguments& arguments, int64_t num_threads, Simd level) {
  const int64_t num_blocks = (arguments.numel + kSquareBlockNumel - 1) / kSquareBlockNumel;
  std::vector<double> block_sums(num_blocks);
  const auto run = [&](const auto* values) {
    const SquareSum<std::decay_t<decltype(*values)>> job{values, arguments.numel,
                                                         block_sums.data()};
    parallel_ranges(num_blocks, 1, kMinRangeNumel / kSquareBlockNumel, num_threads,
                    [&](int64_t first, int64_t last) {
                      const DenormalMode mode(false);
                      square_sum_at(level, job, first, last);
                    });
  };
  visit_dtype(arguments.dtype, [&](auto element) {
    run(reinterpret_cast<const decltype(element)*>(arguments.values));
  });
  return add_in_runs(block_sums.data(), num_blocks);
}

}  // namespace megafsdp
