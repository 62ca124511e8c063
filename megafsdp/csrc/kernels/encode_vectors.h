// Codes of rows by vector instructions, for values that need no clamp: with two thirds of the
// operations that a compiler makes of the loops in tiles.h. With M the bits of a code's mantissa,
//
//   x     the value times its factor, times 2**k
//   base  the power of two in x, at least that in the smallest normal value times 2**k; x's sign
//   sum   base * 2**(23 - M) + x, rounded once: its low bits count steps of the codes near base
//
//   bits of sum                                          s | 110eeeee | 0...0 mmmm
//   the high 16 of them + the low 16 times 2**(7 - M)    s | 110..code | 0...0
//
// where k makes 192 the least exponent of sums: a code's exponent is the low bits of a sum's, and m
// carries into it as the mantissa of a code does. Multiplying by powers of two rounds nothing.
//
// A value is unusual if it is not finite, if it is beyond the largest of the element, or if the
// maximum of its tile, below 2**-54, makes factor * 2**k overflow. In other tiles a subnormal
// number has the code of zero, so it may stay unrounded where values pass through bf16.
#pragma once

#include <cstdint>
#include <type_traits>

#include "float16.h"
#include "float8.h"
#include "simd.h"
#include "stream.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megafsdp {

// Columns that are taken at a time.
constexpr int64_t kVectorCols = 64;

#if defined(__x86_64__)

template <typename Element>
struct VectorCode {
  using Bits = typename Element::Bits;
  static constexpr int kNumBits = 1 + Bits::kExponentBits + Bits::kMantissaBits;
  static constexpr uint32_t kLeastExponent = 192;
  static constexpr uint32_t kLeastBase = (kLeastExponent - Bits::kShift) << 23;
  // k, at the place of a float's exponent.
  static constexpr uint32_t kRaise = kLeastBase - Bits::kSmallestNormal;
  static constexpr float kStepsOfBase = static_cast<float>(1 << Bits::kShift);
  // Weights of the low and the high half of a sum.
  static constexpr int32_t kWeights = 1 << 16 | 1 << (7 - Bits::kMantissaBits);
  // From 16 bits of a sum to its code right below the sign.
  static constexpr int kLift = 8 - Bits::kExponentBits;
  static constexpr int32_t kLargestLifted =
      (((Element::kLargestBits - Bits::kSmallestNormal) >> Bits::kShift) +
       (1u << Bits::kMantissaBits))
      << (16 - kNumBits);
  // Just below halfway from the largest value to the one that would follow it.
  static constexpr uint32_t kLargestUsual =
      Element::kLargestBits + kRaise + (1u << (Bits::kShift - 1)) - 1;
};

constexpr uint32_t kSignBits = ~kMagnitudeMask;
constexpr uint32_t kFloatOneBits = 0x3f800000;
constexpr float kStepsOfBFloat16Base = 0x1p16f;
// Two codes of 4 bits in neighbouring bytes times these, added, are one byte.
constexpr int16_t kJoin = 1 << 12 | 1;

MEGAFSDP_AVX2 MEGAFSDP_INLINE __m256 float_of_avx2(uint32_t bits) {
  return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int32_t>(bits)));
}

MEGAFSDP_AVX2 MEGAFSDP_INLINE __m256 load_avx2(const float* from) { return _mm256_loadu_ps(from); }

MEGAFSDP_AVX2 MEGAFSDP_INLINE __m256 load_avx2(const BFloat16* from) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

// Rounds by adding and subtracting a multiple of the value's power of two. Zero may lose its sign.
template <typename Through>
MEGAFSDP_AVX2 MEGAFSDP_INLINE __m256 round_avx2(__m256 value) {
  if constexpr (std::is_same_v<Through, BFloat16>) {
    const __m256 base = _mm256_and_ps(value, float_of_avx2(kSignBits | kInfinityBits));
    const __m256 steps = _mm256_set1_ps(kStepsOfBFloat16Base);
    return _mm256_fnmadd_ps(base, steps, _mm256_fmadd_ps(base, steps, value));
  } else {
    return value;
  }
}

// Takes sums without signs, and adds the signs to the codes.
template <int64_t kRows, typename Element, typename Through, typename Source>
MEGAFSDP_AVX2 bool encode_avx2(const Source* values, int64_t stride, const float* factors,
                               int64_t num_cols, uint8_t* codes, bool streams) {
  using Code = VectorCode<Element>;
  const __m256 raise = float_of_avx2(kFloatOneBits + Code::kRaise);
  const __m256 magnitude_bits = float_of_avx2(kMagnitudeMask);
  const __m256 exponent_bits = float_of_avx2(kInfinityBits);
  const __m256i least_base = _mm256_set1_epi32(Code::kLeastBase);
  const __m256 steps = _mm256_set1_ps(Code::kStepsOfBase);
  const __m256i weights = _mm256_set1_epi32(Code::kWeights);
  const __m256i signs_of_bytes = _mm256_set1_epi8(static_cast<char>(0x80));
  // Packing takes from its operands in turn, in each half of a vector: this undoes the order.
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i largest = _mm256_setzero_si256();
  for (int64_t col = 0; col < num_cols; col += 32) {
    __m256 of_cols[4];
    for (int64_t i = 0; i < 4; ++i) {
      of_cols[i] = _mm256_mul_ps(_mm256_loadu_ps(factors + col + 8 * i), raise);
    }
    for (int64_t row = 0; row < kRows; ++row) {
      __m256i given[4], sums[4], lifted[2];
      for (int64_t i = 0; i < 4; ++i) {
        const __m256 value = load_avx2(values + row * stride + col + 8 * i);
        const __m256 magnitude = _mm256_and_ps(round_avx2<Through>(value), magnitude_bits);
        const __m256 x = _mm256_mul_ps(magnitude, of_cols[i]);
        const __m256i power = _mm256_castps_si256(_mm256_and_ps(x, exponent_bits));
        const __m256 base = _mm256_castsi256_ps(_mm256_max_epi32(power, least_base));
        const __m256 sum = _mm256_fmadd_ps(base, steps, x);
        largest = _mm256_max_epu32(largest, _mm256_castps_si256(x));
        sums[i] = _mm256_madd_epi16(_mm256_castps_si256(sum), weights);
        given[i] = _mm256_castps_si256(value);
      }
      for (int64_t i = 0; i < 2; ++i) {
        const __m256i pair = _mm256_packs_epi32(sums[2 * i], sums[2 * i + 1]);
        lifted[i] = _mm256_slli_epi16(pair, Code::kLift);
        lifted[i] = _mm256_srli_epi16(lifted[i], 16 - Code::kNumBits);
      }
      // Packing saturates and keeps the sign of every number.
      __m256i signs = _mm256_packs_epi16(_mm256_packs_epi32(given[0], given[1]),
                                         _mm256_packs_epi32(given[2], given[3]));
      signs = _mm256_srli_epi16(_mm256_and_si256(signs, signs_of_bytes), 8 - Code::kNumBits);
      const __m256i packed = _mm256_or_si256(_mm256_packus_epi16(lifted[0], lifted[1]), signs);
      const __m256i bytes = _mm256_permutevar8x32_epi32(packed, in_order);
      uint8_t* const to = codes + (row * stride + col) / Element::kCodesPerByte;
      if constexpr (Element::kCodesPerByte == 2) {
        const __m256i joined = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(kJoin));
        const __m256i halves = _mm256_packus_epi16(joined, joined);
        const __m256i whole = _mm256_permute4x64_epi64(halves, 0b1000);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(whole));
      } else if (streams) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bytes);
      } else {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
      }
    }
  }
  const __m256i limit = _mm256_set1_epi32(Code::kLargestUsual);
  const __m256i is_usual = _mm256_cmpeq_epi32(_mm256_max_epu32(largest, limit), limit);
  return _mm256_movemask_epi8(is_usual) == -1;
}

// GCC 12 warns of undefined values in its own header.
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

MEGAFSDP_AVX512 MEGAFSDP_INLINE __m512 float_of_avx512(uint32_t bits) {
  return _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int32_t>(bits)));
}

MEGAFSDP_AVX512 MEGAFSDP_INLINE __m512 load_avx512(const float* from) {
  return _mm512_loadu_ps(from);
}

MEGAFSDP_AVX512 MEGAFSDP_INLINE __m512 load_avx512(const BFloat16* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

MEGAFSDP_AVX512 MEGAFSDP_INLINE __m512 power_avx512(__m512 value) {
  return _mm512_and_ps(value, float_of_avx512(kSignBits | kInfinityBits));
}

template <typename Through>
MEGAFSDP_AVX512 MEGAFSDP_INLINE __m512 round_avx512(__m512 value) {
  if constexpr (std::is_same_v<Through, BFloat16>) {
    const __m512 base = power_avx512(value);
    const __m512 steps = _mm512_set1_ps(kStepsOfBFloat16Base);
    return _mm512_fnmadd_ps(base, steps, _mm512_fmadd_ps(base, steps, value));
  } else {
    return value;
  }
}

// Returns the power of two in x, with the sign of the value that x comes from.
template <typename Through>
MEGAFSDP_AVX512 MEGAFSDP_INLINE __m512 power_avx512(__m512 x, __m512 value) {
  if constexpr (std::is_same_v<Through, BFloat16>) {
    // Takes the bit of b where a has one, else that of c.
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_set1_epi32(kInfinityBits), _mm512_castps_si512(x),
        _mm512_castps_si512(power_avx512(value)), 0xca));
  } else {
    return power_avx512(x);
  }
}

// Takes sums with signs.
template <int64_t kRows, typename Element, typename Through, typename Source>
MEGAFSDP_AVX512 bool encode_avx512(const Source* values, int64_t stride, const float* factors,
                                   int64_t num_cols, uint8_t* codes, bool streams) {
  using Code = VectorCode<Element>;
  // Bitwise functions of three operands.
  constexpr int kAOrBOrC = 0xfe, kBWhereCElseA = 0xd8;
  constexpr int kLargerWithFirstSign = 0b0011;
  const __m512 raise = float_of_avx512(kFloatOneBits + Code::kRaise);
  const __m512 least_base = float_of_avx512(Code::kLeastBase);
  const __m512 steps = _mm512_set1_ps(Code::kStepsOfBase);
  const __m512i weights = _mm512_set1_epi32(Code::kWeights);
  const __m512i sign_of_pair = _mm512_set1_epi16(static_cast<int16_t>(0x8000));
  // Packing takes from its operands in turn, in each quarter of a vector: this undoes the order.
  const __m512i in_order =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  // The same for joined codes, which are packed with themselves, in units of 16 bits.
  const __m512i joined_in_order = _mm512_castsi256_si512(
      _mm256_setr_epi16(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27));
  __m512i exponents = _mm512_setzero_si512(), largest = _mm512_setzero_si512();
  for (int64_t col = 0; col < num_cols; col += 64) {
    __m512 of_cols[4];
    for (int64_t i = 0; i < 4; ++i) {
      of_cols[i] = _mm512_mul_ps(_mm512_loadu_ps(factors + col + 16 * i), raise);
    }
    for (int64_t row = 0; row < kRows; ++row) {
      __m512i sums[4], lifted[2];
      for (int64_t i = 0; i < 4; ++i) {
        const __m512 value = load_avx512(values + row * stride + col + 16 * i);
        const __m512 x = _mm512_mul_ps(round_avx512<Through>(value), of_cols[i]);
        const __m512 base =
            _mm512_range_ps(power_avx512<Through>(x, value), least_base, kLargerWithFirstSign);
        sums[i] = _mm512_castps_si512(_mm512_fmadd_ps(base, steps, x));
      }
      for (int64_t i = 0; i < 2; ++i) {
        const __m512i left = sums[2 * i], right = sums[2 * i + 1];
        exponents = _mm512_ternarylogic_epi32(exponents, left, right, kAOrBOrC);
        const __m512i pair = _mm512_packs_epi32(_mm512_madd_epi16(left, weights),
                                                _mm512_madd_epi16(right, weights));
        lifted[i] = _mm512_slli_epi16(pair, Code::kLift);
        largest = _mm512_max_epu16(largest, lifted[i]);
        lifted[i] = _mm512_ternarylogic_epi32(lifted[i], pair, sign_of_pair, kBWhereCElseA);
        lifted[i] = _mm512_srli_epi16(lifted[i], 16 - Code::kNumBits);
      }
      const __m512i packed = _mm512_packus_epi16(lifted[0], lifted[1]);
      uint8_t* const to = codes + (row * stride + col) / Element::kCodesPerByte;
      if constexpr (Element::kCodesPerByte == 2) {
        const __m512i joined = _mm512_maddubs_epi16(packed, _mm512_set1_epi16(kJoin));
        const __m512i twice = _mm512_packus_epi16(joined, joined);
        const __m256i bytes =
            _mm512_castsi512_si256(_mm512_permutexvar_epi16(joined_in_order, twice));
        if (streams) {
          _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bytes);
        } else {
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bytes);
        }
      } else {
        const __m512i bytes = _mm512_permutexvar_epi32(in_order, packed);
        if (streams) {
          _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bytes);
        } else {
          _mm512_storeu_si512(to, bytes);
        }
      }
    }
  }
  // No exponent is below the least, so one that is beyond a code's range has one of these bits.
  constexpr uint32_t kBeyond = (1u << 29) - (1u << (23 + Code::Bits::kExponentBits));
  const auto is_beyond = _mm512_test_epi32_mask(exponents, _mm512_set1_epi32(kBeyond));
  const auto is_larger =
      _mm512_cmpgt_epu16_mask(largest, _mm512_set1_epi16(Code::kLargestLifted));
  return (is_beyond | is_larger) == 0;
}

#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif

#endif

// Writes the codes of some rows, of kVectorCols columns or a multiple, and returns true; or returns
// false if codes may be wrong, because a value is unusual or the level or the type has no vectors.
// If streams is set, rows of codes that begin with a cache line are streamed; the caller must
// fence.
template <int64_t kRows, typename Element, typename Through, typename Source>
bool encode_vectors(Simd level, const Source* values, int64_t stride, const float* factors,
                    int64_t num_cols, uint8_t* codes, bool streams) {
#if defined(__x86_64__)
  if constexpr (!std::is_same_v<Source, Float16> && !std::is_same_v<Through, Float16>) {
    streams = streams && begins(codes, kLineNbytes) &&
              stride % (kLineNbytes * Element::kCodesPerByte) == 0;
    if (level == Simd::kAvx512) {
      return encode_avx512<kRows, Element, Through>(values, stride, factors, num_cols, codes,
                                                    streams);
    }
    if (level == Simd::kAvx2) {
      return encode_avx2<kRows, Element, Through>(values, stride, factors, num_cols, codes,
                                                  streams);
    }
  }
#endif
  return false;
}

}  // namespace megafsdp
