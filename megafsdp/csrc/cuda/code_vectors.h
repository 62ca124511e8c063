// Values and codes of a thread: eight neighbours of a row, in one or two vectors.
//
// Inputs are fp32, or 16 bits that stand for bf16 or fp16. Which of these two, and a type to round
// to first, are known at run time. GPUs from sm_89 on have instructions for 8-bit floats. They give
// the bits of kernels/float8.h except for NaN, whose code is chosen here.
//
// The file compiles for the host too.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels/float16.h"
#include "../kernels/float4.h"
#include "../kernels/float8.h"
#include "stored_values.h"
#include "vectors.h"

namespace megafsdp {

// Elements of a row that one thread has: at least 16 bytes of every type that is read.
constexpr int kNeighbours = 8;

template <typename Element>
constexpr int kCodeBytes = kNeighbours / Element::kCodesPerByte;

template <typename Source>
using Neighbours = Vector<Source, kNeighbours>;

// Neighbours as words: where branches meet, a compiler chooses between values one by one. For
// 16-bit values it would take each word apart as soon as it is loaded.
template <typename Source>
using NeighbourWords = Vector<uint32_t, sizeof(Neighbours<Source>) / sizeof(uint32_t)>;

template <typename Source>
MEGAFSDP_INLINE Neighbours<Source> neighbours_of(const NeighbourWords<Source>& words) {
  Neighbours<Source> values;
  memcpy(&values, &words, sizeof values);
  return values;
}

// Loads the first ones of some neighbours, one by one; the others are zero.
template <typename Source>
MEGAFSDP_INLINE NeighbourWords<Source> load_first(const void* values, int64_t first, int count) {
  Neighbours<Source> loaded = {};
  MEGAFSDP_UNROLL
  for (int k = 0; k < kNeighbours; ++k) {
    if (k < count) loaded.at[k] = static_cast<const Source*>(values)[first + k];
  }
  NeighbourWords<Source> words;
  memcpy(&words, &loaded, sizeof words);
  return words;
}

template <typename Element>
using CodeVector = Vector<uint8_t, kCodeBytes<Element>>;

// How values are read.
struct Reading {
  Dtype dtype;
  // Type that fp32 is rounded to first; kNone for none.
  Dtype through;
};

MEGAFSDP_INLINE float read_value(float value, const Reading& reading) {
  if (reading.through == Dtype::kBFloat16) return to_float(FromFloat<BFloat16>::convert(value));
  if (reading.through == Dtype::kFloat16) return to_float(FromFloat<Float16>::convert(value));
  return value;
}

MEGAFSDP_INLINE float read_value(uint16_t bits, const Reading& reading) {
  return decoded(bits, reading.dtype);
}

// The choice is outside of the loops: one branch for all values.
template <typename Source, typename Visit>
MEGAFSDP_INLINE void visit_reading(const Reading& reading, const Visit& visit) {
  if constexpr (std::is_same_v<Source, float>) {
    if (reading.through == Dtype::kBFloat16) return visit(Reading{reading.dtype, Dtype::kBFloat16});
    if (reading.through == Dtype::kFloat16) return visit(Reading{reading.dtype, Dtype::kFloat16});
    visit(Reading{reading.dtype, Dtype::kNone});
  } else {
    if (reading.dtype == Dtype::kFloat16) return visit(Reading{Dtype::kFloat16, Dtype::kNone});
    visit(Reading{Dtype::kBFloat16, Dtype::kNone});
  }
}

template <typename Source>
MEGAFSDP_INLINE Neighbours<float> read_values(const Neighbours<Source>& values,
                                              const Reading& reading) {
  Neighbours<float> result;
  visit_reading<Source>(reading, [&](const Reading known) {
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; ++k) result.at[k] = read_value(values.at[k], known);
  });
  return result;
}

MEGAFSDP_INLINE void encode_two(float low, float high, Dtype dtype, float* to) {
  encode(low, dtype, to[0]);
  encode(high, dtype, to[1]);
}

// GPUs round two values to bf16 by one instruction, which gives NaN its own bits.
MEGAFSDP_INLINE void encode_two(float low, float high, Dtype dtype, uint16_t* to) {
#if defined(__CUDA_ARCH__)
  if (dtype == Dtype::kBFloat16) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    memcpy(to, &pair, sizeof pair);
    return;
  }
#endif
  encode(low, dtype, to[0]);
  encode(high, dtype, to[1]);
}

// Like read_values(), with one branch for all values.
template <typename Out>
MEGAFSDP_INLINE Neighbours<Out> write_values(const Neighbours<float>& values, Dtype dtype) {
  Neighbours<Out> results;
  visit_reading<Out>({dtype, Dtype::kNone}, [&](const Reading known) {
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; k += 2) {
      encode_two(values.at[k], values.at[k + 1], known.dtype, results.at + k);
    }
  });
  return results;
}

// Returns the larger of each two halves.
MEGAFSDP_INLINE uint32_t larger_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __vmaxu2(a, b);
#else
  const uint32_t low_a = a & 0xffff, low_b = b & 0xffff, high_a = a >> 16, high_b = b >> 16;
  return (low_a > low_b ? low_a : low_b) | (high_a > high_b ? high_a : high_b) << 16;
#endif
}

// Gives lanes of a warp that are a multiple of kApart apart the largest of their words; returns
// whether the lane is the first of them. On the host a thread is alone.
template <typename Largest, uint32_t kApart, int kCount>
MEGAFSDP_INLINE bool join_lanes_of([[maybe_unused]] uint32_t (&words)[kCount]) {
#if defined(__CUDA_ARCH__)
  MEGAFSDP_UNROLL
  for (uint32_t apart = kApart; apart < 32; apart *= 2) {
    MEGAFSDP_UNROLL
    for (uint32_t& word : words) {
      word = Largest::larger(word, __shfl_xor_sync(~0u, word, apart));
    }
  }
  return threadIdx.x % 32 < kApart;
#else
  return true;
#endif
}

// Largest magnitudes of some vectors, column by column. 16-bit magnitudes are ordered as their
// values are, so two of them are compared at once, in the stored form.
template <typename Source>
class LargestOf;

template <>
class LargestOf<float> {
 public:
  // How many stored magnitudes a word of 32 bits holds. placed() and taken() put one in and take it
  // out by its number, larger() compares two words magnitude by magnitude.
  static constexpr uint32_t kOfWord = 1;

  MEGAFSDP_INLINE static uint32_t placed(uint32_t magnitude, uint32_t) { return magnitude; }

  MEGAFSDP_INLINE static uint32_t taken(uint32_t word, uint32_t) { return word; }

  MEGAFSDP_INLINE static uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

  // Returns the bits of a stored magnitude as a float.
  MEGAFSDP_INLINE static uint32_t widened(uint32_t magnitude, Dtype) { return magnitude; }

  // Returns the largest of all as it is stored, and then as the bits of a float.
  MEGAFSDP_INLINE uint32_t stored() const { return of_all(Dtype::kFloat32); }

  MEGAFSDP_INLINE void note(const Neighbours<float>& values) {
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; ++k) {
      const uint32_t bits = bits_of(values.at[k]) & kMagnitudeMask;
      bits_[k] = bits > bits_[k] ? bits : bits_[k];
    }
  }

  MEGAFSDP_INLINE uint32_t stored_of_column(int k) const { return bits_[k]; }

  // Joins what lanes have noted for the same columns; see join_lanes_of().
  template <uint32_t kApart>
  MEGAFSDP_INLINE bool join_lanes() {
    return join_lanes_of<LargestOf, kApart>(bits_);
  }

  MEGAFSDP_INLINE uint32_t of_all(Dtype) const {
    uint32_t largest = 0;
    MEGAFSDP_UNROLL
    for (uint32_t bits : bits_) largest = bits > largest ? bits : largest;
    return largest;
  }

 private:
  uint32_t bits_[kNeighbours] = {};
};

template <>
class LargestOf<uint16_t> {
 public:
  static constexpr uint32_t kOfWord = 2;

  MEGAFSDP_INLINE static uint32_t placed(uint32_t magnitude, uint32_t number) {
    return magnitude << number % 2 * 16;
  }

  MEGAFSDP_INLINE static uint32_t taken(uint32_t word, uint32_t number) {
    return word >> number % 2 * 16 & 0xffff;
  }

  MEGAFSDP_INLINE static uint32_t larger(uint32_t a, uint32_t b) { return larger_halves(a, b); }

  MEGAFSDP_INLINE static uint32_t widened(uint32_t magnitude, Dtype dtype) {
    return bits_of(decoded(static_cast<uint16_t>(magnitude), dtype));
  }

  MEGAFSDP_INLINE uint32_t stored() const {
    uint32_t largest = 0;
    MEGAFSDP_UNROLL
    for (uint32_t pair : pairs_) largest = larger_halves(largest, pair);
    return larger_halves(largest, largest >> 16) & 0xffff;
  }

  MEGAFSDP_INLINE void note(const Neighbours<uint16_t>& values) {
    constexpr uint32_t kMagnitudes = 0x7fff7fff;
    uint32_t pairs[kPairs];
    memcpy(pairs, &values, sizeof values);
    MEGAFSDP_UNROLL
    for (int k = 0; k < kPairs; ++k) pairs_[k] = larger_halves(pairs_[k], pairs[k] & kMagnitudes);
  }

  MEGAFSDP_INLINE uint32_t stored_of_column(int k) const {
    return pairs_[k / 2] >> (k % 2 * 16) & 0xffff;
  }

  template <uint32_t kApart>
  MEGAFSDP_INLINE bool join_lanes() {
    return join_lanes_of<LargestOf, kApart>(pairs_);
  }

  MEGAFSDP_INLINE uint32_t of_all(Dtype dtype) const { return widened(stored(), dtype); }

 private:
  static constexpr int kPairs = kNeighbours / 2;

  uint32_t pairs_[kPairs] = {};
};

// Returns the value to encode: NaN if it is not finite, since infinity or NaN times zero is NaN. A
// GPU has more room for these three operations than for bit patterns and selects; zeros keep signs.
MEGAFSDP_INLINE float scaled(float value, float factor) { return value * factor + value * 0.0f; }

template <typename Element>
MEGAFSDP_INLINE uint32_t code_of(float value) {
  return Element::encode(value);
}

// Rounds to one of two codes by noise.
MEGAFSDP_INLINE uint32_t code_by_chance(float value, float noise) {
  return E2M1::encode_stochastically(value, noise);
}

// Returns the codes of two numbers, neither of which is NaN.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
template <typename Element>
MEGAFSDP_INLINE uint32_t encode_numbers(float low, float high) {
  uint16_t codes;
  if constexpr (std::is_same_v<Element, E4M3>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  }
  return codes;
}

template <typename Element>
MEGAFSDP_INLINE void decode_pair(uint32_t codes, float& low, float& high) {
  uint32_t halves;
  const auto pair = static_cast<uint16_t>(codes);
  // Each of their values is exact in fp16.
  if constexpr (std::is_same_v<Element, E4M3>) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
  }
  asm("cvt.f32.f16 %0, %1;" : "=f"(low) : "h"(static_cast<uint16_t>(halves)));
  asm("cvt.f32.f16 %0, %1;" : "=f"(high) : "h"(static_cast<uint16_t>(halves >> 16)));
}
#else
template <typename Element>
MEGAFSDP_INLINE uint32_t encode_numbers(float low, float high) {
  return code_of<Element>(low) | code_of<Element>(high) << 8;
}

template <typename Element>
MEGAFSDP_INLINE void decode_pair(uint32_t codes, float& low, float& high) {
  low = Element::decode(codes & 0xff);
  high = Element::decode(codes >> 8);
}
#endif

template <typename Element>
MEGAFSDP_INLINE uint32_t encode_pair(float low, float high) {
  const uint32_t codes = encode_numbers<Element>(low, high);
  const uint32_t of_low = low != low ? 0x7fu : codes & 0xffu;
  const uint32_t of_high = high != high ? 0x7fu : codes >> 8;
  return of_low | of_high << 8;
}

// Returns the codes of scaled values.
template <typename Element>
MEGAFSDP_INLINE CodeVector<Element> encode_values(const Neighbours<float>& values) {
  CodeVector<Element> codes;
  MEGAFSDP_UNROLL
  for (int k = 0; k < kNeighbours; k += 2) {
    const float low = values.at[k], high = values.at[k + 1];
    if constexpr (Element::kCodesPerByte == 1) {
      const uint32_t pair = encode_pair<Element>(low, high);
      codes.at[k] = static_cast<uint8_t>(pair);
      codes.at[k + 1] = static_cast<uint8_t>(pair >> 8);
    } else {
      codes.at[k / 2] = static_cast<uint8_t>(code_of<Element>(low) | code_of<Element>(high) << 4);
    }
  }
  return codes;
}

// Scales values by a factor each and returns their 8-bit codes. With are_finite, values and factors
// are finite: nothing is NaN, and half of the operations are left.
template <typename Element>
MEGAFSDP_INLINE CodeVector<Element> encode_bytes(Neighbours<float> values,
                                                 const Neighbours<float>& factors,
                                                 bool are_finite) {
  static_assert(Element::kCodesPerByte == 1, "of 8 bits");
  // Words: a compiler makes one choice for each of them, and would make four for its bytes.
  uint32_t words[kCodeBytes<Element> / 4];
  if (are_finite) {
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; k += 4) {
      const uint32_t low = encode_numbers<Element>(values.at[k] * factors.at[k],
                                                   values.at[k + 1] * factors.at[k + 1]);
      const uint32_t high = encode_numbers<Element>(values.at[k + 2] * factors.at[k + 2],
                                                    values.at[k + 3] * factors.at[k + 3]);
      words[k / 4] = low | high << 16;
    }
  } else {
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; ++k) values.at[k] = scaled(values.at[k], factors.at[k]);
    const CodeVector<Element> codes = encode_values<Element>(values);
    memcpy(words, &codes, sizeof codes);
  }
  CodeVector<Element> codes;
  memcpy(&codes, words, sizeof codes);
  return codes;
}

// Like encode_values(), rounded by noise.
MEGAFSDP_INLINE CodeVector<E2M1> encode_values_stochastically(const Neighbours<float>& values,
                                                              const Neighbours<float>& noise) {
  CodeVector<E2M1> codes;
  MEGAFSDP_UNROLL
  for (int k = 0; k < kNeighbours; k += 2) {
    const uint32_t low = code_by_chance(values.at[k], noise.at[k]);
    const uint32_t high = code_by_chance(values.at[k + 1], noise.at[k + 1]);
    codes.at[k / 2] = static_cast<uint8_t>(low | high << 4);
  }
  return codes;
}

template <typename Element>
MEGAFSDP_INLINE Neighbours<float> decode_values(const CodeVector<Element>& codes) {
  Neighbours<float> values;
  if constexpr (Element::kCodesPerByte == 1) {
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; k += 2) {
      const uint32_t pair = codes.at[k] | static_cast<uint32_t>(codes.at[k + 1]) << 8;
      decode_pair<Element>(pair, values.at[k], values.at[k + 1]);
    }
  } else {
    // The bits of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 lie in the two high bytes of a float: a lookup of
    // bytes finds them for four codes at once.
    constexpr uint32_t kLow03 = 0xc0800000, kLow47 = 0xc0804000;
    constexpr uint32_t kHigh03 = 0x3f3f3f00, kHigh47 = 0x40404040;
    constexpr uint32_t kSign = 1u << 31, kMagnitudes = 0x7777;
    uint32_t word;
    memcpy(&word, &codes, sizeof word);
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; k += 4) {
      const uint32_t four = word >> 4 * k;
      const uint32_t low = pick_bytes(kLow03, kLow47, four & kMagnitudes);
      const uint32_t high = pick_bytes(kHigh03, kHigh47, four & kMagnitudes);
      const uint32_t pairs[2] = {pick_bytes(low, high, 0x5140), pick_bytes(low, high, 0x7362)};
      MEGAFSDP_UNROLL
      for (int j = 0; j < 4; ++j) {
        const uint32_t bits = j % 2 == 0 ? pairs[j / 2] << 16 : pairs[j / 2] & 0xffff0000;
        values.at[k + j] = float_of(bits | (four << (28 - 4 * j) & kSign));
      }
    }
  }
  return values;
}

}  // namespace megafsdp
