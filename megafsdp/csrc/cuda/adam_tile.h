// One thread's part of a tile of Adam: loads, update, stores, and which elements they are.
//
// A tile of kTileNumel elements belongs to one block, kVectorNumel of them in a row to each thread,
// so that a warp reads one piece of memory. A vector that lies inside its segment, in buffers that
// are aligned for it, is moved whole, 16 bytes of fp32; any other element by element:
//
//   thread    0        1        2        3
//   element   0 1 2 3  4 5 6 7  8 9 . .  . . . .      segments [0, 5), [5, 10)
//             whole    4 | 5-7  8 9
//
// The file compiles for the host too, where a test runs every thread of every tile in turn.
#pragma once

#include <cstdint>

#include "../kernels/adam_buffers.h"
#include "../kernels/float16.h"
#include "../kernels/flushing.h"
#include "../kernels/halves.h"

namespace megafsdp {

constexpr int kThreads = 256;
constexpr int kVectorNumel = 4;
constexpr int64_t kTileNumel = int64_t{kThreads} * kVectorNumel;

template <typename T>
struct alignas(kVectorNumel * sizeof(T)) Vector {
  T at[kVectorNumel];
};

// Elements [start, stop) of a tile that share their constants.
struct TileRange {
  int64_t tile_start;
  int64_t start;
  int64_t stop;
  bool is_aligned;
};

// Returns the first segment that ends behind an element, or num_segments. None before known does.
MEGAFSDP_INLINE int64_t first_segment_behind(const AdamSegment* segments, int64_t num_segments,
                                             int64_t element, int64_t known) {
  int64_t first = known, last = num_segments;
  if (first < last && segments[first].stop > element) return first;
  while (first < last) {
    const int64_t middle = first + (last - first) / 2;
    if (segments[middle].stop > element) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

// Tells whether an address is that of a whole vector; null, of a buffer that is not there, is.
inline bool is_vector_address(const void* address, int64_t itemsize) {
  return reinterpret_cast<uintptr_t>(address) % (kVectorNumel * itemsize) == 0;
}

inline bool has_vector_addresses(const AdamBuffers& job) {
  return is_vector_address(job.weight, job.remainder == nullptr ? 4 : 2) &&
         is_vector_address(job.remainder, 2) &&
         is_vector_address(job.grad, itemsize_of(job.grad_dtype)) &&
         is_vector_address(job.exp_avg, itemsize_of(job.state_dtype)) &&
         is_vector_address(job.exp_avg_sq, itemsize_of(job.state_dtype)) &&
         is_vector_address(job.copy_out, 2);
}

// Where the vector stands in the buffers, and which of its elements count.
struct VectorSpot {
  int64_t first;
  int begin;
  int end;
  bool is_whole;
};

MEGAFSDP_INLINE VectorSpot spot_of(const TileRange& range, int thread) {
  const int64_t first = range.tile_start + int64_t{thread} * kVectorNumel;
  const int64_t begin = range.start - first, end = range.stop - first;
  VectorSpot spot;
  spot.first = first;
  spot.begin = begin < 0 ? 0 : (begin > kVectorNumel ? kVectorNumel : static_cast<int>(begin));
  spot.end = end < 0 ? 0 : (end > kVectorNumel ? kVectorNumel : static_cast<int>(end));
  spot.is_whole = range.is_aligned && spot.begin == 0 && spot.end == kVectorNumel;
  return spot;
}

template <typename T>
MEGAFSDP_INLINE Vector<T> load(const void* base, const VectorSpot& spot) {
  const T* from = static_cast<const T*>(base) + spot.first;
  if (spot.is_whole) return *reinterpret_cast<const Vector<T>*>(from);
  Vector<T> values{};
  MEGAFSDP_UNROLL
  for (int k = 0; k < kVectorNumel; ++k) {
    if (spot.begin <= k && k < spot.end) values.at[k] = from[k];
  }
  return values;
}

template <typename T>
MEGAFSDP_INLINE void store(void* base, const VectorSpot& spot, const Vector<T>& values) {
  T* to = static_cast<T*>(base) + spot.first;
  if (spot.is_whole) {
    *reinterpret_cast<Vector<T>*>(to) = values;
  } else {
    MEGAFSDP_UNROLL
    for (int k = 0; k < kVectorNumel; ++k) {
      if (spot.begin <= k && k < spot.end) to[k] = values.at[k];
    }
  }
}

// As stored: uint16_t stands for bf16 and fp16.
MEGAFSDP_INLINE float decoded(float value, Dtype) { return value; }

MEGAFSDP_INLINE float decoded(uint16_t bits, Dtype dtype) {
  return dtype == Dtype::kFloat16 ? to_float(Float16{bits}) : to_float(BFloat16{bits});
}

MEGAFSDP_INLINE void encode(float value, Dtype, float& to) { to = value; }

MEGAFSDP_INLINE void encode(float value, Dtype dtype, uint16_t& to) {
  to = dtype == Dtype::kFloat16 ? FromFloat<Float16>::convert(value).bits
                                : FromFloat<BFloat16>::convert(value).bits;
}

MEGAFSDP_INLINE float joined(float weight, int16_t) { return weight; }

MEGAFSDP_INLINE float joined(uint16_t high, int16_t low) { return join_halves(high, low); }

MEGAFSDP_INLINE void split(float value, float& weight, int16_t&) { weight = value; }

MEGAFSDP_INLINE void split(float value, uint16_t& high, int16_t& low) {
  split_halves(value, high, low);
}

// Updates the elements of a range that are a thread's. Weight is uint16_t with a remainder.
template <typename Math, typename Grad, typename State, typename Weight>
MEGAFSDP_INLINE void adam_vector(const AdamBuffers& job, const AdamConstants& constants,
                                 float grad_scale, const TileRange& range, int thread) {
  constexpr bool kHasRemainder = sizeof(Weight) == 2;
  const VectorSpot spot = spot_of(range, thread);
  if (spot.begin >= spot.end) return;
  // All loads come first: they are on their way together.
  const Vector<Grad> grads = load<Grad>(job.grad, spot);
  Vector<State> exp_avgs = load<State>(job.exp_avg, spot);
  Vector<State> exp_avg_sqs = load<State>(job.exp_avg_sq, spot);
  Vector<Weight> weights = load<Weight>(job.weight, spot);
  Vector<int16_t> remainders{};
  Vector<uint16_t> copies{};
  if (kHasRemainder) remainders = load<int16_t>(job.remainder, spot);
  MEGAFSDP_UNROLL
  for (int k = 0; k < kVectorNumel; ++k) {
    const float g = Math::mul(Math::take(decoded(grads.at[k], job.grad_dtype)), grad_scale);
    float p = Math::take(joined(weights.at[k], remainders.at[k]));
    float m = Math::take(decoded(exp_avgs.at[k], Dtype::kBFloat16));
    float v = Math::take(decoded(exp_avg_sqs.at[k], Dtype::kBFloat16));
    adam_update<Math>(constants, g, p, m, v);
    encode(m, Dtype::kBFloat16, exp_avgs.at[k]);
    encode(v, Dtype::kBFloat16, exp_avg_sqs.at[k]);
    split(p, weights.at[k], remainders.at[k]);
    if (!kHasRemainder && job.copy_out != nullptr) encode(p, job.copy_out_dtype, copies.at[k]);
  }
  store(job.exp_avg, spot, exp_avgs);
  store(job.exp_avg_sq, spot, exp_avg_sqs);
  store(job.weight, spot, weights);
  if (kHasRemainder) store(job.remainder, spot, remainders);
  if (!kHasRemainder && job.copy_out != nullptr) store(job.copy_out, spot, copies);
}

// What all threads of a launch share.
struct AdamTask {
  const AdamBuffers& buffers;
  int64_t numel;
  const AdamSegment* segments;
  int64_t num_segments;
  float grad_scale;
  bool is_aligned;
};

// Updates a thread's elements of one tile, segment by segment. Returns the first of these segments,
// which is where to look for those of a later tile; known is the one of an earlier tile, or 0.
template <typename Math, typename Grad, typename State, typename Weight>
MEGAFSDP_INLINE int64_t adam_tile(const AdamTask& task, int64_t tile, int thread, int64_t known) {
  const int64_t tile_start = tile * kTileNumel;
  const int64_t end = tile_start + kTileNumel;
  const int64_t tile_stop = end < task.numel ? end : task.numel;
  const int64_t first = first_segment_behind(task.segments, task.num_segments, tile_start, known);
  for (int64_t i = first; i < task.num_segments; ++i) {
    const AdamSegment& segment = task.segments[i];
    if (segment.start >= tile_stop) break;
    const TileRange range{tile_start, segment.start > tile_start ? segment.start : tile_start,
                          segment.stop < tile_stop ? segment.stop : tile_stop, task.is_aligned};
    adam_vector<Math, Grad, State, Weight>(task.buffers, segment.constants, task.grad_scale, range,
                                           thread);
  }
  return first;
}

}  // namespace megafsdp
