// One step of delayed scaling: append a maximum to a history, and choose the one for the scale.
//
// All are bits of fp32 magnitudes, whose order is that of the numbers. For each history:
//   if 0 < maximum < inf, and for a weight also maximum != newest:
//     history = history[1:] + [maximum]
//   an input or gradient is scaled by max(history)
//   a weight by max(history[:-1]), or by the newest if that is 0; by NaN if maximum >= inf
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

namespace megafsdp {

constexpr int32_t kInfiniteBits = 0x7F800000;
constexpr int32_t kNanBits = 0x7FC00000;

// Histories of one length, one a row, each with a maximum and a maximum for the scale.
struct HistoriesJob {
  int32_t* histories;
  int64_t num_histories;
  int64_t length;
  const int32_t* maxima;
  int32_t* used;
  bool is_of_weights;

  MEGAFSDP_INLINE void operator()() const {
    for (int64_t row = 0; row < num_histories; ++row) {
      int32_t* const history = histories + row * length;
      int32_t* const newest = history + length - 1;
      // Read before anything is written: maxima and outputs may be the same memory.
      const int32_t maximum = maxima[row];
      const bool is_recorded = maximum > 0 && maximum < kInfiniteBits;
      if (is_recorded && !(is_of_weights && maximum == *newest)) {
        std::memmove(history, history + 1, (length - 1) * sizeof *history);
        *newest = maximum;
      }
      int32_t largest = 0;
      for (int64_t step = 0; step < length - 1; ++step) {
        largest = history[step] > largest ? history[step] : largest;
      }
      if (!is_of_weights) {
        used[row] = *newest > largest ? *newest : largest;
      } else {
        used[row] = maximum >= kInfiniteBits ? kNanBits : largest > 0 ? largest : *newest;
      }
    }
  }
};

}  // namespace megafsdp
