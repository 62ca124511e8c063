// Adam over flat buffers, a tile at a time: one loop that loads an element, updates it and stores
// it, compiled for each combination of stored types. Gradients and copies in fp16 go through fp32.
//
// The naive formula is the first comment of adam_formula.h. Elements do not touch each other, so
// results do not depend on tiles, threads or instruction sets.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "adam_buffers.h"
#include "float16.h"
#include "halves.h"
#include "simd.h"
#include "stream.h"

namespace megafsdp {

struct IeeeMath {
  MEGAFSDP_INLINE static float add(float a, float b) { return a + b; }
  MEGAFSDP_INLINE static float sub(float a, float b) { return a - b; }
  MEGAFSDP_INLINE static float mul(float a, float b) { return a * b; }
  MEGAFSDP_INLINE static float div(float a, float b) { return a / b; }
  MEGAFSDP_INLINE static float root_over(float a, float b) { return __builtin_sqrtf(a) / b; }
};

// For processors with a fused multiply-add.
struct FusedMath : IeeeMath {
  MEGAFSDP_INLINE static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
};

// For processors without one: the product is exact in double, and the sum is rounded to odd;
// rounding that to float gives the same as rounding the exact sum.
struct PlainMath : IeeeMath {
  MEGAFSDP_INLINE static float fma(float a, float b, float c) {
    const double product = static_cast<double>(a) * static_cast<double>(b);
    const double addend = static_cast<double>(c);
    const double total = product + addend;
    const double back = total - product;
    const double error = (product - (total - back)) + (addend - back);
    uint64_t bits;
    std::memcpy(&bits, &total, sizeof bits);
    const bool is_finite = (bits & 0x7ff0000000000000) != 0x7ff0000000000000;
    const bool must_move = error != 0.0 && is_finite && (bits & 1) == 0;
    const uint64_t towards = (error > 0.0) == (total > 0.0) ? 1 : ~uint64_t{0};
    bits += must_move ? towards : 0;
    double odd;
    std::memcpy(&odd, &bits, sizeof odd);
    return static_cast<float>(odd);
  }
};

#if defined(__x86_64__)
template <Simd level>
using MathOf = std::conditional_t<level == Simd::kScalar, PlainMath, FusedMath>;
#else
template <Simd level>
using MathOf = FusedMath;
#endif

// Elements of a tile; a constant count lets the compiler drop the loop's end.
constexpr int64_t kTileNumel = 64;
constexpr int64_t kPrefetchNumel = 256;

// Addresses of fp32 weights to read and to write, with a bf16 copy or without.
struct PlainWeights {
  const float* from;
  float* to;
  MEGAFSDP_INLINE float load(int64_t i) const { return from[i]; }
  MEGAFSDP_INLINE void store(int64_t i, float weight) const { to[i] = weight; }
};

struct CopiedWeights : PlainWeights {
  BFloat16* copy;
  MEGAFSDP_INLINE void store(int64_t i, float weight) const {
    to[i] = weight;
    copy[i] = FromFloat<BFloat16>::convert(weight);
  }
};

// Weights kept as bf16 values and remainders.
struct HalvedWeights {
  uint16_t* high;
  int16_t* low;
  MEGAFSDP_INLINE float load(int64_t i) const { return join_halves(high[i], low[i]); }
  MEGAFSDP_INLINE void store(int64_t i, float weight) const {
    split_halves(weight, high[i], low[i]);
  }
};

template <typename State>
struct Moments {
  State* exp_avg;
  State* exp_avg_sq;
};

template <typename Math, typename Grad, typename State, typename Weights>
MEGAFSDP_INLINE void adam_loop(const AdamConstants& c, const Grad* grad, float scale,
                               Moments<State> old, Moments<State> updated, Weights weights,
                               int64_t count) {
  Math math;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    float p = weights.load(i), m = to_float(old.exp_avg[i]), v = to_float(old.exp_avg_sq[i]);
    adam_update(math, c, to_float(grad[i]) * scale, p, m, v);
    weights.store(i, p);
    updated.exp_avg[i] = FromFloat<State>::convert(m);
    updated.exp_avg_sq[i] = FromFloat<State>::convert(v);
  }
}

// Conversions of fp16 are long: compilers vectorise them only in a loop of their own.
MEGAFSDP_INLINE void decode(const Float16* from, float* to, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

MEGAFSDP_INLINE void encode(const float* from, Float16* to, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) to[i] = FromFloat<Float16>::convert(from[i]);
}

// One tile whose weights are fp32: in place, or with results elsewhere. Streamed results are kept
// in local arrays until the whole tile is computed.
template <Simd level, typename Weights, typename Grad, typename State>
MEGAFSDP_INLINE void fp32_tile(const AdamBuffers& job, const AdamConstants& c, const Grad* grad,
                               Moments<State> old, int64_t start, int64_t count) {
  float rooms[3][kTileNumel];
  uint16_t copy_room[kTileNumel];
  auto* weight = static_cast<float*>(job.weight) + start;
  auto* copy = static_cast<uint16_t*>(job.copy_out) + start;
  Moments<State> updated = old;
  PlainWeights weights{weight, weight};
  bool streams_all = false;
  if constexpr (std::is_same_v<State, float>) {
    if (job.new_weight != nullptr) {
      streams_all = job.streams;
      weights.to = streams_all ? rooms[0] : job.new_weight + start;
      updated.exp_avg = streams_all ? rooms[1] : job.new_exp_avg + start;
      updated.exp_avg_sq = streams_all ? rooms[2] : job.new_exp_avg_sq + start;
    }
  }
  uint16_t* const copied = job.streams ? copy_room : copy;
  if constexpr (std::is_same_v<Weights, CopiedWeights>) {
    const CopiedWeights both{weights, reinterpret_cast<BFloat16*>(copied)};
    adam_loop<MathOf<level>>(c, grad, job.grad_scale, old, updated, both, count);
  } else {
    adam_loop<MathOf<level>>(c, grad, job.grad_scale, old, updated, weights, count);
    if (job.copy_out != nullptr) encode(weights.to, reinterpret_cast<Float16*>(copied), count);
  }
  if (job.streams && job.copy_out != nullptr) stream<level>(copy_room, copy, count);
  if constexpr (std::is_same_v<State, float>) {
    if (!streams_all) return;
    stream<level>(rooms[0], job.new_weight + start, count);
    stream<level>(rooms[1], job.new_exp_avg + start, count);
    stream<level>(rooms[2], job.new_exp_avg_sq + start, count);
  }
}

template <Simd level, typename Grad, typename State, typename Weights>
MEGAFSDP_INLINE void adam_tile(const AdamBuffers& job, const AdamConstants& c, int64_t start,
                               int64_t count) {
  const Moments<State> moments{static_cast<State*>(job.exp_avg) + start,
                               static_cast<State*>(job.exp_avg_sq) + start};
  const auto* grad = static_cast<const Grad*>(job.grad) + start;
  float decoded[kTileNumel];
  if constexpr (std::is_same_v<Grad, float>) {
    if (job.grad_dtype == Dtype::kFloat16) {
      decode(static_cast<const Float16*>(job.grad) + start, decoded, count);
      grad = decoded;
    }
  }
  if constexpr (std::is_same_v<Weights, HalvedWeights>) {
    const Weights weights{static_cast<uint16_t*>(job.weight) + start, job.remainder + start};
    adam_loop<MathOf<level>>(c, grad, job.grad_scale, moments, moments, weights, count);
  } else {
    fp32_tile<level, Weights>(job, c, grad, moments, start, count);
  }
}

// Prefetching an address beyond a buffer's end is harmless.
MEGAFSDP_INLINE void prefetch_tile(const AdamBuffers& job, int64_t start) {
  const auto prefetch = [start](const void* base, int64_t itemsize) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(base) + start * itemsize;
    for (int64_t byte = 0; byte < kTileNumel * itemsize; byte += kLineNbytes) {
      __builtin_prefetch(reinterpret_cast<const void*>(address + byte));
    }
  };
  prefetch(job.weight, job.remainder == nullptr ? 4 : 2);
  if (job.remainder != nullptr) prefetch(job.remainder, 2);
  prefetch(job.grad, itemsize_of(job.grad_dtype));
  prefetch(job.exp_avg, itemsize_of(job.state_dtype));
  prefetch(job.exp_avg_sq, itemsize_of(job.state_dtype));
}

// Returns the number of elements to where fp32 outputs begin a pair of lines, at which the 16-bit
// copy_out begins a line.
MEGAFSDP_INLINE int64_t numel_to_line(const AdamBuffers& job, int64_t start) {
  if (!job.streams || job.new_weight == nullptr) return 0;
  constexpr uintptr_t kNbytes = 2 * kLineNbytes;
  const auto address = reinterpret_cast<uintptr_t>(job.new_weight + start);
  return static_cast<int64_t>((kNbytes - address % kNbytes) % kNbytes / sizeof(float));
}

// Runs elements start to stop, all with the same constants.
template <Simd level, typename Grad, typename State, typename Weights>
MEGAFSDP_INLINE void adam_run(const AdamBuffers& job, const AdamConstants& constants, int64_t start,
                              int64_t stop) {
  const AdamConstants c = constants;
  // A line that two tiles write in part may be transferred twice, once after each tile.
  int64_t wished = numel_to_line(job, start);
  for (; start < stop; start += wished, wished = 0) {
    if (wished == 0) wished = kTileNumel;
    if (wished == kTileNumel && start + wished <= stop) {
      if (job.prefetches) prefetch_tile(job, start + kPrefetchNumel);
      adam_tile<level, Grad, State, Weights>(job, c, start, kTileNumel);
    } else {
      if (start + wished > stop) wished = stop - start;
      adam_tile<level, Grad, State, Weights>(job, c, start, wished);
    }
  }
}

template <typename... Types>
void adam_scalar(const AdamBuffers& job, const AdamConstants& constants, int64_t start,
                 int64_t stop) {
  adam_run<Simd::kScalar, Types...>(job, constants, start, stop);
}

template <typename... Types>
MEGAFSDP_AVX2 void adam_avx2(const AdamBuffers& job, const AdamConstants& constants, int64_t start,
                             int64_t stop) {
  adam_run<Simd::kAvx2, Types...>(job, constants, start, stop);
}

template <typename... Types>
MEGAFSDP_AVX512 void adam_avx512(const AdamBuffers& job, const AdamConstants& constants,
                                 int64_t start, int64_t stop) {
  adam_run<Simd::kAvx512, Types...>(job, constants, start, stop);
}

using AdamRun = void (*)(const AdamBuffers&, const AdamConstants&, int64_t, int64_t);

template <typename... Types>
AdamRun run_at(Simd level) {
  if (level == Simd::kAvx512) return adam_avx512<Types...>;
  if (level == Simd::kAvx2) return adam_avx2<Types...>;
  return adam_scalar<Types...>;
}

template <typename... Types>
AdamRun run_with_weights(Simd level, const AdamBuffers& job) {
  if (job.remainder != nullptr) return run_at<Types..., HalvedWeights>(level);
  if (job.copy_out_dtype == Dtype::kBFloat16) return run_at<Types..., CopiedWeights>(level);
  return run_at<Types..., PlainWeights>(level);
}

template <typename Grad>
AdamRun run_with_states(Simd level, const AdamBuffers& job) {
  if (job.state_dtype == Dtype::kBFloat16) return run_with_weights<Grad, BFloat16>(level, job);
  return run_with_weights<Grad, float>(level, job);
}

// Returns what runs a job of these types.
inline AdamRun run_of(Simd level, const AdamBuffers& job) {
  if (job.grad_dtype == Dtype::kBFloat16) return run_with_states<BFloat16>(level, job);
  return run_with_states<float>(level, job);
}

// Runs the parts of segments between start and stop.
inline void adam_at(Simd level, const AdamBuffers& job, const std::vector<AdamSegment>& segments,
                    int64_t start, int64_t stop) {
  const AdamRun run = run_of(level, job);
  for (const AdamSegment& segment : segments) {
    const int64_t first = segment.start > start ? segment.start : start;
    const int64_t last = segment.stop < stop ? segment.stop : stop;
    if (first < last) run(job, segment.constants, first, last);
  }
  if (job.streams) fence_streams();
}

}  // namespace megafsdp
