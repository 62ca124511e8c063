// The 4-bit float e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Two codes share a byte, the
// even one in its low half.
//
// No code means NaN: it becomes 0, and the scale must carry it.
#pragma once

#include <cstdint>
#include <cstring>

#include "float8.h"

namespace megafsdp {

struct E2M1 {
  using Bits = SmallFloat<2, 1>;
  static constexpr float kLargest = 6.0f;
  static constexpr float kReciprocal = static_cast<float>(1.0 / 6.0);
  static constexpr int kCodesPerByte = 2;
  static constexpr uint32_t kLargestBits = 0x40c00000;
  static constexpr uint32_t kNanCode = 0;

  MEGAFSDP_INLINE static uint32_t encode(float value) { return encode_value<E2M1>(value); }

  // Returns the code of a magnitude and of the sign bit of any number. It is rounded up if noise,
  // in [0, 1), is less than the distance from the code below, in steps between codes there. Steps
  // are powers of two, so nothing but the result is rounded.
  MEGAFSDP_INLINE static uint32_t encode_parts_stochastically(uint32_t magnitude, uint32_t sign,
                                                              float noise, bool is_nan) {
    const float clamped = float_of(magnitude > kLargestBits ? kLargestBits : magnitude);
    const bool is_above_2 = clamped >= 2.0f, is_above_4 = clamped >= 4.0f;
    const float steps_per_one = is_above_4 ? 0.5f : (is_above_2 ? 1.0f : 2.0f);
    const int32_t offset = is_above_4 ? 4 : (is_above_2 ? 2 : 0);
    const float in_steps = clamped * steps_per_one;
    const int32_t below = static_cast<int32_t>(in_steps);
    const int32_t is_up = noise < in_steps - static_cast<float>(below) ? 1 : 0;
    const uint32_t code = static_cast<uint32_t>(below + is_up + offset) | (sign >> 31 << 3);
    // A mask instead of a branch: the compiler would move the conversion to an integer behind a
    // branch, and then not vectorise it.
    static_assert(kNanCode == 0, "a mask gives zero");
    return code & (static_cast<uint32_t>(is_nan) - 1);
  }

  MEGAFSDP_INLINE static uint32_t encode_stochastically(float value, float noise) {
    const uint32_t bits = bits_of(value), magnitude = bits & kMagnitudeMask;
    return encode_parts_stochastically(magnitude, bits, noise, magnitude > kInfinityBits);
  }

  MEGAFSDP_INLINE static float decode(uint32_t code) {
    const uint32_t magnitude = Bits::decode_magnitude(code & Bits::kCodeMask);
    return float_of(magnitude | (code & Bits::kSignBit) << 28);
  }
};

// Puts pairs of codes into bytes. A pair is read here, and written by unpack(), as one number; all
// processors that this is built for are little-endian.
MEGAFSDP_INLINE void pack(const uint8_t* codes, uint8_t* bytes, int64_t num_codes) {
  for (int64_t i = 0; i < num_codes / 2; ++i) {
    uint16_t pair;
    std::memcpy(&pair, codes + 2 * i, sizeof pair);
    bytes[i] = static_cast<uint8_t>(pair | pair >> 4);
  }
}

MEGAFSDP_INLINE void unpack(const uint8_t* bytes, uint8_t* codes, int64_t num_codes) {
  for (int64_t i = 0; i < num_codes / 2; ++i) {
    const uint16_t pair = static_cast<uint16_t>((bytes[i] | bytes[i] << 4) & 0x0f0f);
    std::memcpy(codes + 2 * i, &pair, sizeof pair);
  }
}

}  // namespace megafsdp
