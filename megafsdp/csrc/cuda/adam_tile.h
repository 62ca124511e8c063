// One thread's part of a tile of Adam: loads, update, stores, and which elements they are.
//
// A tile belongs to one block, a vector of neighbouring elements to each thread, so that a warp
// reads and writes memory without gaps. A vector that lies inside a row of the table, in buffers
// that are aligned for it, is moved whole; any other vector element by element:
//
//   thread    0        1        2        3
//   element   0 1 2 3  4 5 6 7  8 9 . .  . . . .      rows [0, 5), [5, 10)
//             whole    4 | 5-7  8 9
//
// Whole vectors are computed without branches. A vector that may need one, for a result at the
// border of kernels/flushing.h, stores nothing and is computed again element by element.
//
// The file compiles for the host too, where a test runs every thread of every tile in turn.
#pragma once

#include <cstdint>

#include "../kernels/adam_buffers.h"
#include "../kernels/float16.h"
#include "../kernels/flushing.h"
#include "../kernels/halves.h"
#include "adam_table.h"
#include "stored_values.h"
#include "vectors.h"

namespace megafsdp {

constexpr int kThreads = 256;

// Elements of a thread's vector: as many as make 16 bytes of the widest type. A buffer of a
// narrower type then moves 8 bytes a thread, and each warp still fills all the sectors that it
// touches.
constexpr int vector_numel(int64_t widest) { return static_cast<int>(kVectorNbytes / widest); }

template <typename Grad, typename State, typename Weight>
constexpr int kVectorNumel =
    vector_numel(sizeof(Grad) == 4 || sizeof(State) == 4 ? 4 : sizeof(Weight));

inline int vector_numel_of(const AdamBuffers& job) {
  const bool is_narrow = job.remainder != nullptr && itemsize_of(job.grad_dtype) == 2 &&
                         itemsize_of(job.state_dtype) == 2;
  return vector_numel(is_narrow ? 2 : 4);
}

inline int64_t tile_numel_of(const AdamBuffers& job) {
  return int64_t{kThreads} * vector_numel_of(job);
}

// Returns the first row that ends behind an element, or num_rows. No row before known does.
MEGAFSDP_INLINE int first_row_behind(const AdamRow* rows, int num_rows, int64_t element,
                                     int known) {
  int first = known, last = num_rows;
  if (first < last && rows[first].stop > element) return first;
  while (first < last) {
    const int middle = first + (last - first) / 2;
    if (rows[middle].stop > element) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

// Tells whether all buffers are aligned for whole vectors; a null buffer is.
inline bool has_vector_addresses(const AdamBuffers& job) {
  const auto is_vector_address = [numel = vector_numel_of(job)](const void* base,
                                                                int64_t itemsize) {
    return reinterpret_cast<uintptr_t>(base) % (numel * itemsize) == 0;
  };
  return is_vector_address(job.weight, job.remainder == nullptr ? 4 : 2) &&
         is_vector_address(job.remainder, 2) &&
         is_vector_address(job.grad, itemsize_of(job.grad_dtype)) &&
         is_vector_address(job.exp_avg, itemsize_of(job.state_dtype)) &&
         is_vector_address(job.exp_avg_sq, itemsize_of(job.state_dtype)) &&
         is_vector_address(job.copy_out, 2);
}

// Rows without gradients have zeros, for which a GPU's root and quotient have no fast path: they
// would go through calls of a hundred instructions.
template <typename Math>
struct FastZeros : Math {
  MEGAFSDP_INLINE static float root_over(float a, float b) {
    const float quotient = Math::root_over(a == 0.0f ? 1.0f : a, b);
    return a == 0.0f ? a : quotient;
  }

  // If b is not positive, 0 / b may be NaN, or have another sign.
  MEGAFSDP_INLINE static float div(float a, float b) {
    const bool is_zero = a == 0.0f && b > 0.0f;
    const float quotient = Math::div(is_zero ? b : a, b);
    return is_zero ? a : quotient;
  }
};

MEGAFSDP_INLINE float joined(float weight, int16_t) { return weight; }

MEGAFSDP_INLINE float joined(uint16_t high, int16_t low) { return join_halves(high, low); }

MEGAFSDP_INLINE void split(float value, float& weight, int16_t&) { weight = value; }

MEGAFSDP_INLINE void split(float value, uint16_t& high, int16_t& low) {
  split_halves(value, high, low);
}

// What all threads of a launch share.
struct AdamTask {
  const AdamBuffers& buffers;
  const AdamRow* rows;
  int num_rows;
  const AdamConstants* constants;
  float grad_scale;
  bool is_aligned;
};

// One element as it is stored.
template <typename Grad, typename State, typename Weight>
struct Element {
  Grad grad;
  State exp_avg;
  State exp_avg_sq;
  Weight weight;
  int16_t remainder;
};

// With a remainder Weight is uint16_t, and there is no copy of it.
template <typename Weight>
constexpr bool kHasRemainder = sizeof(Weight) == 2;

template <typename Math, typename Grad, typename State, typename Weight>
MEGAFSDP_INLINE void adam_element(Math& math, const AdamTask& task, const AdamConstants& constants,
                                  Element<Grad, State, Weight>& e) {
  const AdamBuffers& job = task.buffers;
  const float g = math.mul(math.take(decoded(e.grad, job.grad_dtype)), task.grad_scale);
  float p = math.take(joined(e.weight, e.remainder));
  float m = math.take(decoded(e.exp_avg, Dtype::kBFloat16));
  float v = math.take(decoded(e.exp_avg_sq, Dtype::kBFloat16));
  adam_update(math, constants, g, p, m, v);
  encode(m, Dtype::kBFloat16, e.exp_avg);
  encode(v, Dtype::kBFloat16, e.exp_avg_sq);
  split(p, e.weight, e.remainder);
}

// Updates a whole vector; or returns false, having stored nothing.
template <typename Math, typename Grad, typename State, typename Weight>
MEGAFSDP_INLINE bool adam_vector(const AdamTask& task, const AdamConstants& constants,
                                 int64_t vector) {
  constexpr int kNumel = kVectorNumel<Grad, State, Weight>;
  const AdamBuffers& job = task.buffers;
  // All loads come first, so that they are in flight together.
  const auto grads = load_once<Vector<Grad, kNumel>>(job.grad, vector);
  auto exp_avgs = load<Vector<State, kNumel>>(job.exp_avg, vector);
  auto exp_avg_sqs = load<Vector<State, kNumel>>(job.exp_avg_sq, vector);
  auto weights = load<Vector<Weight, kNumel>>(job.weight, vector);
  Vector<int16_t, kNumel> remainders{};
  if (kHasRemainder<Weight>) remainders = load<Vector<int16_t, kNumel>>(job.remainder, vector);
  typename Math::Deferred math;
  MEGAFSDP_UNROLL
  for (int k = 0; k < kNumel; ++k) {
    Element<Grad, State, Weight> e{grads.at[k], exp_avgs.at[k], exp_avg_sqs.at[k], weights.at[k],
                                   remainders.at[k]};
    adam_element(math, task, constants, e);
    exp_avgs.at[k] = e.exp_avg;
    exp_avg_sqs.at[k] = e.exp_avg_sq;
    weights.at[k] = e.weight;
    remainders.at[k] = e.remainder;
  }
  if (math.is_in_doubt()) return false;
  store(job.exp_avg, vector, exp_avgs);
  store(job.exp_avg_sq, vector, exp_avg_sqs);
  store(job.weight, vector, weights);
  if constexpr (kHasRemainder<Weight>) {
    store(job.remainder, vector, remainders);
  } else if (job.copy_out != nullptr) {
    Vector<uint16_t, kNumel> copies;
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNumel; ++k) encode(weights.at[k], job.copy_out_dtype, copies.at[k]);
    store(job.copy_out, vector, copies);
  }
  return true;
}

// Updates one element, which may be at any address and have results at the border.
template <typename Math, typename Grad, typename State, typename Weight>
MEGAFSDP_INLINE void adam_scalar(const AdamTask& task, const AdamConstants& constants, int64_t i) {
  const AdamBuffers& job = task.buffers;
  auto& exp_avg = static_cast<State*>(job.exp_avg)[i];
  auto& exp_avg_sq = static_cast<State*>(job.exp_avg_sq)[i];
  auto& weight = static_cast<Weight*>(job.weight)[i];
  const int16_t remainder = kHasRemainder<Weight> ? job.remainder[i] : int16_t{0};
  const Grad grad = static_cast<const Grad*>(job.grad)[i];
  Element<Grad, State, Weight> e{grad, exp_avg, exp_avg_sq, weight, remainder};
  Math math;
  adam_element(math, task, constants, e);
  exp_avg = e.exp_avg;
  exp_avg_sq = e.exp_avg_sq;
  weight = e.weight;
  if constexpr (kHasRemainder<Weight>) {
    job.remainder[i] = e.remainder;
  } else if (job.copy_out != nullptr) {
    encode(weight, job.copy_out_dtype, static_cast<uint16_t*>(job.copy_out)[i]);
  }
}

// Updates a thread's elements of one tile, row by row. Returns the first of these rows, from which
// a later tile begins its search; known is what an earlier tile returned, or 0.
template <typename Math, typename Grad, typename State, typename Weight>
MEGAFSDP_INLINE int adam_tile(const AdamTask& task, int64_t tile, int thread, int known) {
  constexpr int kNumel = kVectorNumel<Grad, State, Weight>;
  const int64_t tile_start = tile * (kThreads * kNumel);
  const int64_t start = tile_start + thread * kNumel, stop = start + kNumel;
  // Searched by the tile, not by the vector, so that all threads of a block search alike.
  const int first = first_row_behind(task.rows, task.num_rows, tile_start, known);
  for (int i = first; i < task.num_rows; ++i) {
    const AdamRow& row = task.rows[i];
    if (row.start >= stop) break;
    const AdamConstants& constants = task.constants[row.constants];
    const bool is_whole = task.is_aligned && row.start <= start && stop <= row.stop;
    if (is_whole && adam_vector<Math, Grad, State, Weight>(task, constants, start / kNumel)) break;
    const int64_t begin = row.start > start ? row.start : start;
    const int64_t end = row.stop < stop ? row.stop : stop;
    MEGAFSDP_ROLL
    for (int64_t k = begin; k < end; ++k) {
      adam_scalar<Math, Grad, State, Weight>(task, constants, k);
    }
  }
  return first;
}

// The tiles that have elements of a nonempty table.
struct TileRange {
  int64_t start;
  int64_t stop;
};

inline TileRange tiles_of(const AdamTable& table, int64_t tile_numel) {
  const int64_t stop = table.rows[table.num_rows - 1].stop;
  return {table.rows[0].start / tile_numel, (stop + tile_numel - 1) / tile_numel};
}

}  // namespace megafsdp
