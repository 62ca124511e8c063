// An fp32 weight as two halves: the nearest bf16 value, in a tie the one further from zero, and the
// low 16 bits.
#pragma once

#include <cstdint>

#include "float16.h"

namespace megafsdp {

MEGAFSDP_INLINE float join_halves(uint16_t high, int16_t low) {
  // A zero has no negative low half of its own, but one that was written over another weight keeps
  // that weight's low half, which would make it NaN.
  const bool is_another = (high & 0x7fff) == 0 && low < 0;
  const uint32_t rest = is_another ? 0 : static_cast<uint32_t>(static_cast<int32_t>(low));
  return float_of((static_cast<uint32_t>(high) << 16) + rest);
}

MEGAFSDP_INLINE void split_halves(float weight, uint16_t& high, int16_t& low) {
  // Rounding up the bits of a NaN with a large payload would give a number.
  const uint32_t raw = bits_of(weight);
  const uint32_t bits = (raw & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : raw;
  high = static_cast<uint16_t>((bits + 0x8000) >> 16);
  low = static_cast<int16_t>(bits);
}

}  // namespace megafsdp
