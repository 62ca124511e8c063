// The factors that follow from a tile's maximum, for encoding and for decoding its values.
//
// A maximum is the bits of a magnitude, which are ordered as magnitudes are. Each family has
//   encode_factor  what values are multiplied with before they are encoded
//   entry          what a table has for the tile
//   decode_factor  what decoded codes are multiplied with, from that entry
// in the order of operations of quantize/scales.py, each rounded once. All are NaN if the maximum
// is not finite. of_matrix is 0 except in the family of two levels.
#pragma once

#include <cstdint>

#include "float4.h"
#include "float8.h"

namespace megafsdp {

constexpr uint32_t kLargestFloatBits = 0x7f7fffff;
constexpr uint32_t kOneBits = 0x3f800000;
constexpr uint32_t kMantissaBits = 0x007fffff;

// Returns largest / maximum: finite, and 1 if the maximum is zero.
MEGAFSDP_INLINE float factor_to(float largest, uint32_t maximum, uint32_t kept_bits) {
  const uint32_t quotient = bits_of(largest / float_of(maximum));
  const uint32_t clamped = quotient > kLargestFloatBits ? kLargestFloatBits : quotient;
  const uint32_t of_any = maximum == 0 ? kOneBits : clamped & kept_bits;
  return float_of(maximum >= kInfinityBits ? kNanBits : of_any);
}

// 1 / value; infinity becomes the largest float, NaN stays.
MEGAFSDP_INLINE float finite_reciprocal(float value) {
  const uint32_t bits = bits_of(1.0f / value);
  return float_of(bits == kInfinityBits ? kLargestFloatBits : bits);
}

// Codes of powers of two: 2**(code - 127), 255 for NaN.
struct E8M0 {
  // Rounds a nonnegative value up.
  MEGAFSDP_INLINE static uint32_t encode(float value) {
    constexpr uint32_t kLeast = 0x00400000;
    const uint32_t bits = bits_of(value) & kMagnitudeMask;
    const uint32_t exponent = bits >> 23;
    const bool is_up = (bits & kMantissaBits) != 0 && exponent < 254 && bits > kLeast;
    return exponent + (is_up ? 1 : 0);
  }

  MEGAFSDP_INLINE static float decode(uint32_t code) {
    const uint32_t finite = code == 0 ? 0x00400000 : code << 23;
    return float_of(code == 255 ? kNanBits : finite);
  }
};

template <bool kIsPowerOfTwo>
struct Fp32Scaling {
  using Entry = float;
  static constexpr bool kHasTwoLevels = false;

  template <typename Element>
  MEGAFSDP_INLINE static float encode_factor(uint32_t maximum, float) {
    return factor_to(Element::kLargest, maximum, kIsPowerOfTwo ? kInfinityBits : ~0u);
  }

  template <typename Element>
  MEGAFSDP_INLINE static Entry entry(uint32_t maximum, float of_matrix) {
    return 1.0f / encode_factor<Element>(maximum, of_matrix);
  }

  MEGAFSDP_INLINE static float decode_factor(Entry entry, float) { return entry; }
};

struct E8M0Scaling {
  using Entry = uint8_t;
  static constexpr bool kHasTwoLevels = false;

  template <typename Element>
  MEGAFSDP_INLINE static Entry entry(uint32_t maximum, float) {
    return static_cast<Entry>(E8M0::encode(float_of(maximum) * Element::kReciprocal));
  }

  template <typename Element>
  MEGAFSDP_INLINE static float encode_factor(uint32_t maximum, float) {
    const uint32_t code = E8M0::encode(float_of(maximum) * Element::kReciprocal);
    return E8M0::decode(code == 255 ? 255 : 254 - code);
  }

  MEGAFSDP_INLINE static float decode_factor(Entry entry, float) { return E8M0::decode(entry); }
};

struct TwoLevelScaling {
  using Entry = uint8_t;
  static constexpr bool kHasTwoLevels = true;
  static constexpr float kLargest = 2688.0f;
  static constexpr float kReciprocal = static_cast<float>(1.0 / 2688.0);

  // Takes the largest maximum of a matrix; gives of_matrix of the next two functions.
  MEGAFSDP_INLINE static float matrix_factor(uint32_t maximum) {
    return factor_to(kLargest, maximum, ~0u);
  }

  template <typename Element>
  MEGAFSDP_INLINE static Entry entry(uint32_t maximum, float of_matrix) {
    return static_cast<Entry>(
        E4M3::encode(float_of(maximum) * (of_matrix * Element::kReciprocal)));
  }

  template <typename Element>
  MEGAFSDP_INLINE static float encode_factor(uint32_t maximum, float of_matrix) {
    const float scale = E4M3::decode(entry<Element>(maximum, of_matrix));
    return finite_reciprocal(scale * (1.0f / of_matrix));
  }

  // Here of_matrix is the largest maximum itself, as the table has it.
  MEGAFSDP_INLINE static float decode_factor(Entry entry, float of_matrix) {
    return E4M3::decode(entry) * of_matrix * kReciprocal;
  }

  MEGAFSDP_INLINE static float matrix_entry(uint32_t maximum) {
    return float_of(maximum >= kInfinityBits ? kNanBits : maximum);
  }
};

enum class ScalingKind { kFp32, kPowerOfTwo, kE8M0, kTwoLevel };

// Calls visit with a value of the family.
template <typename Visit>
MEGAFSDP_INLINE void visit_scaling(ScalingKind kind, const Visit& visit) {
  switch (kind) {
    case ScalingKind::kFp32:
      return visit(Fp32Scaling<false>{});
    case ScalingKind::kPowerOfTwo:
      return visit(Fp32Scaling<true>{});
    case ScalingKind::kE8M0:
      return visit(E8M0Scaling{});
    default:
      return visit(TwoLevelScaling{});
  }
}

}  // namespace megafsdp
