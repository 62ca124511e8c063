#include "adam.h"

#if defined(__linux__)
#include <unistd.h>
#endif

#include "../kernels/adam.h"
#include "../kernels/square_sum.h"
#include "../kernels/threads.h"
#include "arguments.h"

namespace megafsdp {
namespace {

// Thread starts cost as much as some 50 000 elements.
constexpr int64_t kMinRangeNumel = 1 << 17;
// Cuts between threads keep to whole cache lines of every element type.
constexpr int64_t kGrainNumel = 1024;

Dtype dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::kFloat32;
  if (name == "bfloat16") return Dtype::kBFloat16;
  if (name == "float16") return Dtype::kFloat16;
  return Dtype::kNone;
}

// Buffers beyond this are streamed: the last cache, or what of a large one is near one core.
int64_t cached_nbytes() {
  constexpr int64_t kMost = int64_t{32} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const int64_t nbytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (nbytes > 0 && nbytes < kMost) return nbytes;
#endif
  return kMost;
}

int64_t touched_nbytes(const AdamBuffers& job, int64_t numel) {
  return numel * (4 + itemsize_of(job.grad_dtype) + 2 * itemsize_of(job.state_dtype) + 2);
}

void check_segments(const AdamArguments& arguments) {
  int64_t end = 0;
  for (const auto& [start, stop, constants] : arguments.segments) {
    check(end <= start && start <= stop && stop <= arguments.numel,
          "segments: expected rising, disjoint ranges below " + std::to_string(arguments.numel) +
              ", got " + std::to_string(start) + " to " + std::to_string(stop));
    end = stop;
  }
}

}  // namespace

void check_adam(const AdamArguments& arguments) {
  const bool has_remainder = arguments.remainder != 0;
  const Dtype grad_dtype = dtype_of(arguments.grad_dtype);
  const Dtype state_dtype = dtype_of(arguments.state_dtype);
  const Dtype copy_out_dtype = dtype_of(arguments.copy_out_dtype);
  check(grad_dtype != Dtype::kNone,
        "grad_dtype: expected float32, bfloat16 or float16, got " + arguments.grad_dtype);
  check(state_dtype == Dtype::kFloat32 || state_dtype == Dtype::kBFloat16,
        "state_dtype: expected float32 or bfloat16, got " + arguments.state_dtype);
  check_positive("numel", arguments.numel);
  check_positive("num_threads", arguments.num_threads);
  check_address("weight", arguments.weight, has_remainder ? 2 : 4);
  check_address("grad", arguments.grad, itemsize_of(grad_dtype));
  check_address("exp_avg", arguments.exp_avg, itemsize_of(state_dtype));
  check_address("exp_avg_sq", arguments.exp_avg_sq, itemsize_of(state_dtype));
  if (has_remainder) check_address("remainder", arguments.remainder, 2);
  check(arguments.copy_out == 0 || !has_remainder, "copy_out: expected null beside a remainder");
  if (arguments.copy_out != 0) {
    check_address("copy_out", arguments.copy_out, 2);
    check(copy_out_dtype == Dtype::kBFloat16 || copy_out_dtype == Dtype::kFloat16,
          "copy_out_dtype: expected bfloat16 or float16, got " + arguments.copy_out_dtype);
  }
  check_segments(arguments);
}

void run_adam(const AdamArguments& arguments, Simd level) {
  AdamBuffers job{reinterpret_cast<void*>(arguments.weight),
                  reinterpret_cast<int16_t*>(arguments.remainder),
                  reinterpret_cast<const void*>(arguments.grad),
                  reinterpret_cast<void*>(arguments.exp_avg),
                  reinterpret_cast<void*>(arguments.exp_avg_sq),
                  reinterpret_cast<void*>(arguments.copy_out),
                  dtype_of(arguments.grad_dtype),
                  dtype_of(arguments.state_dtype),
                  arguments.copy_out == 0 ? Dtype::kNone : dtype_of(arguments.copy_out_dtype),
                  static_cast<float>(arguments.grad_scale),
                  false};
  // Below this, the copy is likely to be read from the cache that streaming would bypass.
  static const int64_t cache_nbytes = cached_nbytes();
  job.streams_copy_out =
      job.copy_out_dtype != Dtype::kNone && touched_nbytes(job, arguments.numel) > cache_nbytes;
  std::vector<AdamSegment> segments;
  for (const auto& [start, stop, numbers] : arguments.segments) {
    std::array<float, 8> c;
    for (size_t i = 0; i < c.size(); ++i) c[i] = static_cast<float>(numbers[i]);
    segments.push_back({start, stop, {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]}});
  }
  parallel_ranges(arguments.numel, kGrainNumel, kMinRangeNumel, arguments.num_threads,
                  [&](int64_t start, int64_t stop) {
                    const DenormalMode mode(arguments.flush_denormals);
                    adam_at(level, job, segments, start, stop);
                  });
}

void check_square_sum(const SquareSumArguments& arguments) {
  const Dtype dtype = dtype_of(arguments.dtype);
  check(dtype != Dtype::kNone,
        "dtype: expected float32, bfloat16 or float16, got " + arguments.dtype);
  check_positive("numel", arguments.numel);
  check_positive("num_threads", arguments.num_threads);
  check_address("values", arguments.values, itemsize_of(dtype));
}

double run_square_sum(const SquareSumArguments& arguments, Simd level) {
  const int64_t num_blocks = (arguments.numel + kSquareBlockNumel - 1) / kSquareBlockNumel;
  std::vector<double> block_sums(num_blocks);
  const auto run = [&](const auto* values) {
    const SquareSum<std::decay_t<decltype(*values)>> job{values, arguments.numel,
                                                         block_sums.data()};
    parallel_ranges(num_blocks, 1, kMinRangeNumel / kSquareBlockNumel, arguments.num_threads,
                    [&](int64_t first, int64_t last) {
                      const DenormalMode mode(false);
                      square_sum_at(level, job, first, last);
                    });
  };
  switch (dtype_of(arguments.dtype)) {
    case Dtype::kBFloat16:
      run(reinterpret_cast<const BFloat16*>(arguments.values));
      break;
    case Dtype::kFloat16:
      run(reinterpret_cast<const Float16*>(arguments.values));
      break;
    default:
      run(reinterpret_cast<const float*>(arguments.values));
  }
  double total = 0.0;
  for (double sum : block_sums) total += sum;
  return total;
}

}  // namespace megafsdp
