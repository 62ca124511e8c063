// The two 16-bit float types as bits, and their conversions from and to float and double.
//
// Conversions are integer arithmetic and selects without branches, so that a compiler turns them
// into vector code of any width, and give the same bits at every width. Rounding is to nearest
// even. They also hold while subnormal floats are flushed to zero. A NaN stays a NaN; its payload
// is not kept.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

namespace megafsdp {

struct BFloat16 {
  uint16_t bits;
};

struct Float16 {
  uint16_t bits;
};

MEGAFSDP_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

MEGAFSDP_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

MEGAFSDP_INLINE float to_float(float value) { return value; }

MEGAFSDP_INLINE float to_float(BFloat16 value) {
  return float_of(static_cast<uint32_t>(value.bits) << 16);
}

MEGAFSDP_INLINE float to_float(Float16 value) {
  constexpr uint32_t kRebias = (127 - 15) << 23;
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  const uint32_t exponent = value.bits & 0x7c00;
  const uint32_t normal = (static_cast<uint32_t>(value.bits & 0x7fff) << 13) + kRebias;
  const uint32_t subnormal = bits_of(static_cast<float>(value.bits & 0x03ff) * 0x1p-24f);
  const uint32_t infinite = normal + kRebias;
  const uint32_t magnitude = exponent == 0 ? subnormal : (exponent == 0x7c00 ? infinite : normal);
  return float_of(sign | magnitude);
}

template <typename T>
struct FromFloat;

template <>
struct FromFloat<float> {
  MEGAFSDP_INLINE static float convert(float value) { return value; }
};

template <>
struct FromFloat<BFloat16> {
  MEGAFSDP_INLINE static BFloat16 convert(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return {static_cast<uint16_t>(is_nan ? 0x7fc0 : rounded)};
  }
};

template <>
struct FromFloat<Float16> {
  MEGAFSDP_INLINE static Float16 convert(float value) {
    constexpr uint32_t kRebias = (127 - 15) << 23;
    constexpr uint32_t kInfinity = 0x7c00;
    constexpr uint32_t kNan = 0x7e00;
    constexpr uint32_t kSmallestNormal = (127 - 14) << 23;
    const uint32_t bits = bits_of(value);
    const uint32_t magnitude = bits & 0x7fffffff;
    // Floats in [0.5, 1) are as far apart as subnormal halves, so this addition rounds to one of
    // them.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t carried = (magnitude - kRebias + 0x0fff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t normal = carried > kInfinity ? kInfinity : carried;
    const uint32_t finite = magnitude < kSmallestNormal ? subnormal : normal;
    const uint32_t rounded = magnitude > 0x7f800000 ? kNan : finite;
    return {static_cast<uint16_t>((bits >> 16 & 0x8000) | rounded)};
  }
};

}  // namespace megafsdp
