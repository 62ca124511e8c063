// Floats of at most 8 bits, their codes and conversions.
//
// Conversions are integer arithmetic and selects without branches, as those of float16.h. Rounding
// is to nearest even; values beyond the largest become the largest:
//   encode(x) = sign | code nearest to min(|x|, kLargest), kNanCode if x is a NaN
// The naive formula is Element.encode in quantize/elements.py.
#pragma once

#include <cstdint>

#include "float16.h"
#include "inline.h"

namespace megafsdp {

constexpr uint32_t kMagnitudeMask = 0x7fffffff;
constexpr uint32_t kInfinityBits = 0x7f800000;
constexpr uint32_t kNanBits = 0x7fc00000;

// An exponent of kExponent bits and a mantissa of kMantissa, with subnormal values.
template <int kExponent, int kMantissa>
struct SmallFloat {
  static constexpr int kExponentBits = kExponent, kMantissaBits = kMantissa;
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint32_t kSignBit = 1u << (kExponent + kMantissa);
  static constexpr uint32_t kCodeMask = kSignBit - 1;
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kSmallestNormal = kRebias + (1u << 23);
  // Added so that zero gets code 0; it is even, so it does not move ties.
  static constexpr uint32_t kFirstCode = (0u - (kSmallestNormal >> kShift)) & 0xff;

  // The lowest bit of a code that lies at the top of a number, its sign bit the highest.
  static constexpr int kTop = 31 - kExponent - kMantissa;

  // Returns, at the top of a number, the code of a magnitude not above the largest value.
  //
  // A float that is 2**kShift times a power of two is as far from its neighbours as codes are from
  // each other in the binade of that power, so adding it rounds to codes, and counts them in its
  // low bits. Below the smallest normal value codes are as far apart as above it. The code is made
  // at the top so that its parts are joined before a vector is narrowed, and higher bits are
  // shifted out.
  MEGAFSDP_INLINE static uint32_t encode_magnitude(uint32_t magnitude) {
    const uint32_t binade = magnitude & kInfinityBits;
    const uint32_t exponent = binade > kSmallestNormal ? binade : kSmallestNormal;
    const uint32_t anchor = exponent + (static_cast<uint32_t>(kShift) << 23) + kFirstCode;
    const uint32_t sum = bits_of(float_of(magnitude) + float_of(anchor));
    return (sum << kTop) + (exponent << (kTop - kShift));
  }

  // Returns the bits of the magnitude of a finite code, its sign bit cleared.
  //
  // Read as a normal value, a code gives v; a subnormal code means 2 v - smallest normal value. The
  // latter is the smaller of the two if v is below the smallest normal value, which holds for codes
  // of subnormal values only.
  MEGAFSDP_INLINE static uint32_t decode_magnitude(uint32_t code) {
    const uint32_t normal = (code << kShift) + kRebias;
    const uint32_t subnormal =
        bits_of(float_of(normal + (1u << 23)) - float_of(kSmallestNormal));
    return subnormal < normal ? subnormal : normal;
  }
};

// Returns the code of a magnitude and of the sign bit of any number. is_nan replaces the code by
// that of NaN; a NaN as magnitude does not by itself.
template <typename Element>
MEGAFSDP_INLINE uint32_t encode_parts(uint32_t magnitude, uint32_t sign, bool is_nan) {
  constexpr uint32_t kLargestBits = Element::kLargestBits;
  const uint32_t clamped = magnitude > kLargestBits ? kLargestBits : magnitude;
  const uint32_t code = Element::Bits::encode_magnitude(clamped) | (sign & ~kMagnitudeMask);
  return is_nan ? Element::kNanCode : code >> Element::Bits::kTop;
}

// Returns the code of a value.
template <typename Element>
MEGAFSDP_INLINE uint32_t encode_value(float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & kMagnitudeMask;
  return encode_parts<Element>(magnitude, bits, magnitude > kInfinityBits);
}

struct E4M3 {
  using Bits = SmallFloat<4, 3>;
  static constexpr float kLargest = 448.0f;
  // Rounded once from double, as the naive formula's.
  static constexpr float kReciprocal = static_cast<float>(1.0 / 448.0);
  static constexpr int kCodesPerByte = 1;
  static constexpr uint32_t kLargestBits = 0x43e00000;
  static constexpr uint32_t kNanCode = 0x7f;

  MEGAFSDP_INLINE static uint32_t encode(float value) { return encode_value<E4M3>(value); }

  MEGAFSDP_INLINE static float decode(uint32_t code) {
    const uint32_t finite = Bits::decode_magnitude(code & Bits::kCodeMask);
    // All exponent bits with some bits of the finite pattern make a NaN, without a branch.
    const uint32_t nan = (code & Bits::kCodeMask) == 0x7f ? kInfinityBits : 0;
    return float_of(finite | nan | (code & Bits::kSignBit) << 24);
  }
};

struct E5M2 {
  using Bits = SmallFloat<5, 2>;
  static constexpr float kLargest = 57344.0f;
  static constexpr float kReciprocal = static_cast<float>(1.0 / 57344.0);
  static constexpr int kCodesPerByte = 1;
  static constexpr uint32_t kLargestBits = 0x47600000;
  static constexpr uint32_t kNanCode = 0x7f;

  MEGAFSDP_INLINE static uint32_t encode(float value) { return encode_value<E5M2>(value); }

  // Codes above the largest mean infinity and NaN, though encode() gives one of them only.
  MEGAFSDP_INLINE static float decode(uint32_t code) {
    const uint32_t masked = code & Bits::kCodeMask;
    const uint32_t finite = Bits::decode_magnitude(masked);
    const uint32_t beyond = masked == 0x7c ? kInfinityBits : kNanBits;
    const uint32_t magnitude = masked >= 0x7c ? beyond : finite;
    return float_of(magnitude | (code & Bits::kSignBit) << 24);
  }
};

}  // namespace megafsdp
