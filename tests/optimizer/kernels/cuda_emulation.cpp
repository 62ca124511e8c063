// The CUDA kernels of Adam and of the sum of squares with their threads in turn on the host, and
// the flushing of subnormal numbers beside that of the processor. A test compiles this; nothing of
// the package does.
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../../megafsdp/csrc/cuda/adam_tile.h"
#include "../../../megafsdp/csrc/cuda/square_lane.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using namespace megafsdp;

struct HostMath {
  static float add(float a, float b) { return a + b; }
  static float sub(float a, float b) { return a - b; }
  static float mul(float a, float b) { return a * b; }
  static float div(float a, float b) { return a / b; }
  static float root_over(float a, float b) { return __builtin_sqrtf(a) / b; }
  static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static float take(float a) { return flushed(a); }
};

template <typename Math, typename Grad, typename State, typename Weight>
void run_threads(const AdamTask& task, int64_t num_blocks) {
  const int64_t tile_numel = tile_numel_of(task.buffers);
  const int64_t num_tiles = (task.numel + tile_numel - 1) / tile_numel;
  for (int64_t block = 0; block < num_blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) {
      int64_t segment = 0;
      for (int64_t tile = block; tile < num_tiles; tile += num_blocks) {
        segment = adam_tile<Math, Grad, State, Weight>(task, tile, thread, segment);
      }
    }
  }
}

template <typename Math, typename Grad, typename State>
void run_weight(const AdamTask& task, int64_t num_blocks) {
  if (task.buffers.remainder == nullptr) {
    run_threads<Math, Grad, State, float>(task, num_blocks);
  } else {
    run_threads<Math, Grad, State, uint16_t>(task, num_blocks);
  }
}

template <typename Math, typename Grad>
void run_state(const AdamTask& task, int64_t num_blocks) {
  if (task.buffers.state_dtype == Dtype::kFloat32) {
    run_weight<Math, Grad, float>(task, num_blocks);
  } else {
    run_weight<Math, Grad, uint16_t>(task, num_blocks);
  }
}

template <typename Math>
void run_grad(const AdamTask& task, int64_t num_blocks) {
  if (task.buffers.grad_dtype == Dtype::kFloat32) {
    run_state<Math, float>(task, num_blocks);
  } else {
    run_state<Math, uint16_t>(task, num_blocks);
  }
}

template <typename T>
double sum_lanes(const void* values, int64_t numel) {
  std::vector<double> sums;
  for (int64_t block = 0; block * kSquareBlockNumel < numel; ++block) {
    double sum = 0.0;
    for (int lane = 0; lane < kSquareLanes; ++lane) {
      sum += lane_sum(static_cast<const T*>(values), numel, block, lane);
    }
    sums.push_back(sum);
  }
  return add_in_runs(sums.data(), static_cast<int64_t>(sums.size()));
}

#if defined(__x86_64__)
struct Operands {
  float a, b, c;
};

bool have_same_bits(float left, float right) {
  return std::memcmp(&left, &right, sizeof left) == 0;
}

__attribute__((target("fma"), noinline)) float fused(float a, float b, float c) {
  return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}

// The processor's results in its mode for subnormal numbers.
__attribute__((noinline)) void in_mode(const Operands& from, float* results) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  const volatile float a = from.a, b = from.b, c = from.c;
  volatile float product = a * b, quotient = a / b, sum = a + c, difference = a - c;
  const volatile float both = fused(a, b, c);
  _mm_setcsr(before);
  results[0] = product;
  results[1] = quotient;
  results[2] = sum;
  results[3] = difference;
  results[4] = both;
}
#endif

}  // namespace

extern "C" {

// Runs one step. Addresses are buffers of numel elements; dtypes count as Dtype; ranges holds start
// and stop of each segment, and constants eight numbers of each. Returns whether vectors moved
// whole.
bool emulate_adam(void* const* addresses, const int* dtypes, int64_t numel, int64_t num_segments,
                  const int64_t* ranges, const float* constants, float grad_scale, bool flushes,
                  int64_t num_blocks) {
  const AdamBuffers buffers{addresses[0],
                            static_cast<int16_t*>(addresses[1]),
                            addresses[2],
                            addresses[3],
                            addresses[4],
                            addresses[5],
                            static_cast<Dtype>(dtypes[0]),
                            static_cast<Dtype>(dtypes[1]),
                            static_cast<Dtype>(dtypes[2]),
                            grad_scale,
                            false};
  std::vector<AdamSegment> segments(num_segments);
  for (int64_t i = 0; i < num_segments; ++i) {
    segments[i].start = ranges[2 * i];
    segments[i].stop = ranges[2 * i + 1];
    std::memcpy(&segments[i].constants, constants + 8 * i, sizeof(AdamConstants));
    if (flushes) segments[i].constants = flushed(segments[i].constants);
  }
  const bool is_aligned = has_vector_addresses(buffers);
  const float scale = flushes ? flushed(grad_scale) : grad_scale;
  const AdamTask task{buffers, numel, segments.data(), num_segments, scale, is_aligned};
  if (flushes) {
    run_grad<Flushing<FastZeros<HostMath>>>(task, num_blocks);
  } else {
    run_grad<Keeping<FastZeros<HostMath>>>(task, num_blocks);
  }
  return is_aligned;
}

double emulate_square_sum(const void* values, int dtype, int64_t numel) {
  switch (static_cast<Dtype>(dtype)) {
    case Dtype::kBFloat16:
      return sum_lanes<BFloat16>(values, numel);
    case Dtype::kFloat16:
      return sum_lanes<Float16>(values, numel);
    default:
      return sum_lanes<float>(values, numel);
  }
}

// Counts operations on triples of floats whose flushed result is not the processor's own, at once
// or deferred and not in doubt; -1 where there is no such processor. at_border receives how many
// results were the smallest normal number where subnormal ones are kept, and zero where not;
// in_doubt how many deferred ones were in doubt.
int64_t count_flushing_differences(const float* triples, int64_t count, int64_t* at_border,
                                   int64_t* in_doubt) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) return -1;
  int64_t num_differences = 0;
  for (int64_t i = 0; i < count; ++i) {
    using Math = Flushing<HostMath>;
    Math::Deferred deferred[5];
    const Operands raw{triples[3 * i], triples[3 * i + 1], triples[3 * i + 2]};
    const float a = flushed(raw.a), b = flushed(raw.b), c = flushed(raw.c);
    const float mine[] = {Math::mul(a, b), Math::div(a, b), Math::add(a, c), Math::sub(a, c),
                          Math::fma(a, b, c)};
    const float late[] = {deferred[0].mul(a, b), deferred[1].div(a, b), deferred[2].add(a, c),
                          deferred[3].sub(a, c), deferred[4].fma(a, b, c)};
    const float kept[] = {a * b, a / b, a + c, a - c, __builtin_fmaf(a, b, c)};
    float wanted[5];
    in_mode(raw, wanted);
    for (int k = 0; k < 5; ++k) {
      num_differences += !have_same_bits(mine[k], wanted[k]);
      num_differences += !deferred[k].is_in_doubt() && !have_same_bits(late[k], wanted[k]);
      *in_doubt += deferred[k].is_in_doubt();
      *at_border += wanted[k] == 0.0f && (kept[k] == 0x1p-126f || kept[k] == -0x1p-126f);
    }
  }
  return num_differences;
#else
  (void)triples, (void)count, (void)at_border, (void)in_doubt;
  return -1;
#endif
}
}
