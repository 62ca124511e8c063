// Adam over flat buffers: tiles small enough for the first-level cache go through three stages.
//
//   decode  gradient and 16-bit states to fp32
//   update  adam_formula.h
//   encode  to the stored types or, out of place, elsewhere; and the 16-bit copy of the weights
//
// The naive formula is the first comment of adam_formula.h. Elements do not touch each other, so
// neither tiles, threads nor instruction sets show in a result.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "adam_buffers.h"
#include "float16.h"
#include "simd.h"
#include "stream.h"

namespace megafsdp {

struct IeeeMath {
  MEGAFSDP_INLINE static float add(float a, float b) { return a + b; }
  MEGAFSDP_INLINE static float sub(float a, float b) { return a - b; }
  MEGAFSDP_INLINE static float mul(float a, float b) { return a * b; }
  MEGAFSDP_INLINE static float div(float a, float b) { return a / b; }
  MEGAFSDP_INLINE static float sqrt(float a) { return __builtin_sqrtf(a); }
};

// For processors with a fused multiply-add.
struct FusedMath : IeeeMath {
  MEGAFSDP_INLINE static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
};

// For those without: the product is exact in double, and the sum is rounded to odd, after which
// rounding to float gives what rounding the exact sum would.
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

// Elements of a tile; a constant count lets the compiler drop the loops' ends.
constexpr int64_t kTileNumel = 64;
constexpr int64_t kPrefetchNumel = 512;

template <typename T>
MEGAFSDP_INLINE void decode(const T* from, float* to, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) to[i] = to_float(from[i]);
}

template <typename T>
MEGAFSDP_INLINE void encode(const float* from, T* to, int64_t count) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) to[i] = FromFloat<T>::convert(from[i]);
}

template <Simd level, typename T>
MEGAFSDP_INLINE void encode_copy(const float* from, T* to, int64_t count, bool streams) {
  if (streams) {
    T rounded[kTileNumel];
    encode(from, rounded, count);
    stream<level>(&rounded[0].bits, &to->bits, count);
  } else {
    encode(from, to, count);
  }
}

template <Simd level>
MEGAFSDP_INLINE void copy(const float* from, float* to, int64_t count, bool streams) {
  if (streams) {
    stream<level>(from, to, count);
  } else {
    encode(from, to, count);
  }
}

// Prefetches one tile; an address beyond the buffer's end is harmless to ask for.
MEGAFSDP_INLINE void prefetch(const void* base, int64_t offset, int64_t itemsize) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(base) + offset * itemsize;
  for (int64_t byte = 0; byte < kTileNumel * itemsize; byte += 64) {
    __builtin_prefetch(reinterpret_cast<const void*>(address + byte));
  }
}

// The fp32 faces of one tile: in place where a buffer is fp32 and written, else in room.
template <Simd level>
MEGAFSDP_INLINE void adam_tile(const AdamBuffers& job, const AdamConstants& constants,
                               int64_t start, int64_t count) {
  using Math = MathOf<level>;
  float grads[kTileNumel], rooms[3][kTileNumel];
  const auto* grad16 = static_cast<const uint16_t*>(job.grad) + start;
  switch (job.grad_dtype) {
    case Dtype::kBFloat16:
      decode(reinterpret_cast<const BFloat16*>(grad16), grads, count);
      break;
    case Dtype::kFloat16:
      decode(reinterpret_cast<const Float16*>(grad16), grads, count);
      break;
    default:
      decode(static_cast<const float*>(job.grad) + start, grads, count);
  }
  const bool has_narrow_states = job.state_dtype == Dtype::kBFloat16;
  float* m = static_cast<float*>(job.exp_avg) + start;
  float* v = static_cast<float*>(job.exp_avg_sq) + start;
  auto* narrow_m = static_cast<BFloat16*>(job.exp_avg) + start;
  auto* narrow_v = static_cast<BFloat16*>(job.exp_avg_sq) + start;
  if (has_narrow_states) {
    decode(narrow_m, m = rooms[0], count);
    decode(narrow_v, v = rooms[1], count);
  }
  float* p = static_cast<float*>(job.weight) + start;
  auto* high = static_cast<uint16_t*>(job.weight) + start;
  int16_t* low = job.remainder + start;
  if (job.remainder != nullptr) {
    p = rooms[2];
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      p[i] = float_of((static_cast<uint32_t>(high[i]) << 16) + static_cast<uint32_t>(low[i]));
    }
  }
  const float *old_m = m, *old_v = v, *old_p = p;
  const bool is_out_of_place = job.new_weight != nullptr;
  if (is_out_of_place) m = rooms[0], v = rooms[1], p = rooms[2];
  const float scale = job.grad_scale;
  const AdamConstants c = constants;
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) {
    float new_p = old_p[i], new_m = old_m[i], new_v = old_v[i];
    adam_update<Math>(c, grads[i] * scale, new_p, new_m, new_v);
    p[i] = new_p, m[i] = new_m, v[i] = new_v;
  }
  if (has_narrow_states) {
    encode(m, narrow_m, count);
    encode(v, narrow_v, count);
  }
  if (is_out_of_place) {
    copy<level>(p, job.new_weight + start, count, job.streams);
    copy<level>(m, job.new_exp_avg + start, count, job.streams);
    copy<level>(v, job.new_exp_avg_sq + start, count, job.streams);
  }
  if (job.remainder != nullptr) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) {
      // Rounding up the bits of a NaN with a large payload gives a number.
      const uint32_t raw = bits_of(p[i]);
      const uint32_t bits = (raw & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : raw;
      high[i] = static_cast<uint16_t>((bits + 0x8000) >> 16);
      low[i] = static_cast<int16_t>(bits);
    }
  } else if (job.copy_out_dtype == Dtype::kBFloat16) {
    encode_copy<level>(p, static_cast<BFloat16*>(job.copy_out) + start, count, job.streams);
  } else if (job.copy_out_dtype == Dtype::kFloat16) {
    encode_copy<level>(p, static_cast<Float16*>(job.copy_out) + start, count, job.streams);
  }
}

// Returns the elements up to where streamed outputs begin a line, or two of copy_out's 16-bit ones.
MEGAFSDP_INLINE int64_t numel_to_line(const AdamBuffers& job, int64_t start) {
  if (!job.streams || job.new_weight == nullptr) return 0;
  constexpr uintptr_t kNbytes = 2 * kLineNbytes;
  const auto address = reinterpret_cast<uintptr_t>(job.new_weight + start);
  return static_cast<int64_t>((kNbytes - address % kNbytes) % kNbytes / sizeof(float));
}

template <Simd level>
MEGAFSDP_INLINE void adam_run(const AdamBuffers& job, const AdamConstants& constants, int64_t start,
                              int64_t stop) {
  // A line that two tiles write in part may leave the processor between them, as two transfers.
  const int64_t head = numel_to_line(job, start);
  if (head > 0 && start + head < stop) {
    adam_tile<level>(job, constants, start, head);
    start += head;
  }
  for (; start + kTileNumel <= stop; start += kTileNumel) {
    const int64_t ahead = start + kPrefetchNumel;
    prefetch(job.weight, ahead, job.remainder == nullptr ? 4 : 2);
    if (job.remainder != nullptr) prefetch(job.remainder, ahead, 2);
    prefetch(job.grad, ahead, itemsize_of(job.grad_dtype));
    prefetch(job.exp_avg, ahead, itemsize_of(job.state_dtype));
    prefetch(job.exp_avg_sq, ahead, itemsize_of(job.state_dtype));
    adam_tile<level>(job, constants, start, kTileNumel);
  }
  if (start < stop) adam_tile<level>(job, constants, start, stop - start);
}

// Runs elements start to stop, all with the same constants.
inline void adam_scalar(const AdamBuffers& job, const AdamConstants& constants, int64_t start,
                        int64_t stop) {
  adam_run<Simd::kScalar>(job, constants, start, stop);
}

MEGAFSDP_AVX2 inline void adam_avx2(const AdamBuffers& job, const AdamConstants& constants,
                                    int64_t start, int64_t stop) {
  adam_run<Simd::kAvx2>(job, constants, start, stop);
}

MEGAFSDP_AVX512 inline void adam_avx512(const AdamBuffers& job, const AdamConstants& constants,
                                        int64_t start, int64_t stop) {
  adam_run<Simd::kAvx512>(job, constants, start, stop);
}

// Runs what segments have between start and stop.
inline void adam_at(Simd level, const AdamBuffers& job, const std::vector<AdamSegment>& segments,
                    int64_t start, int64_t stop) {
  for (const AdamSegment& segment : segments) {
    const int64_t first = segment.start > start ? segment.start : start;
    const int64_t last = segment.stop < stop ? segment.stop : stop;
    if (first >= last) continue;
    switch (level) {
      case Simd::kScalar:
        adam_scalar(job, segment.constants, first, last);
        break;
      case Simd::kAvx2:
        adam_avx2(job, segment.constants, first, last);
        break;
      case Simd::kAvx512:
        adam_avx512(job, segment.constants, first, last);
        break;
    }
  }
  if (job.streams) fence_streams();
}

}  // namespace megafsdp
