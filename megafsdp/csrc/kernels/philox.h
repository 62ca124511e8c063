// Uniform numbers by counter: Philox 4x32-10, four numbers a counter.
//
// Element i is word i % 4 of counter (i / 4 in 64 bits, stream, 0), its upper 24 bits over 2^24.
// The key is the seed. Numbers depend on nothing else, so any range can be made by itself.
#pragma once

#include <cstdint>

#include "inline.h"

namespace megafsdp {

constexpr int64_t kWordsPerCounter = 4;
// Counters whose words stay in the first-level cache while they are mixed.
constexpr int64_t kCounterBlock = 128;

struct UniformJob {
  uint64_t seed;
  uint32_t stream;
  // The range of counters, and the end of the elements, which may end within a counter.
  int64_t first;
  int64_t last;
  int64_t numel;
  float* out;

  MEGAFSDP_INLINE void operator()() const {
    for (int64_t start = first; start < last; start += kCounterBlock) {
      const int64_t count = last - start < kCounterBlock ? last - start : kCounterBlock;
      uint32_t words[kWordsPerCounter][kCounterBlock];
      for (int64_t i = 0; i < kCounterBlock; ++i) {
        const uint64_t counter = static_cast<uint64_t>(start + i);
        words[0][i] = static_cast<uint32_t>(counter);
        words[1][i] = static_cast<uint32_t>(counter >> 32);
        words[2][i] = stream;
        words[3][i] = 0;
      }
      mix(words);
      float* const to = out + start * kWordsPerCounter;
      const int64_t num_left = numel - start * kWordsPerCounter;
      if (num_left >= count * kWordsPerCounter) {
        for (int64_t i = 0; i < count; ++i) {
          for (int64_t k = 0; k < kWordsPerCounter; ++k) {
            to[i * kWordsPerCounter + k] = fraction(words[k][i]);
          }
        }
      } else {
        for (int64_t i = 0; i < num_left; ++i) {
          to[i] = fraction(words[i % kWordsPerCounter][i / kWordsPerCounter]);
        }
      }
    }
  }

  MEGAFSDP_INLINE static float fraction(uint32_t word) {
    // Signed, as vector units have a conversion for it; 24 bits are exact.
    return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f;
  }

  MEGAFSDP_INLINE void mix(uint32_t (&words)[kWordsPerCounter][kCounterBlock]) const {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      for (int64_t i = 0; i < kCounterBlock; ++i) {
        const uint64_t product0 = uint64_t{words[0][i]} * 0xd2511f53u;
        const uint64_t product2 = uint64_t{words[2][i]} * 0xcd9e8d57u;
        words[0][i] = static_cast<uint32_t>(product2 >> 32) ^ words[1][i] ^ key0;
        words[1][i] = static_cast<uint32_t>(product2);
        words[2][i] = static_cast<uint32_t>(product0 >> 32) ^ words[3][i] ^ key1;
        words[3][i] = static_cast<uint32_t>(product0);
      }
      key0 += 0x9e3779b9u;
      key1 += 0xbb67ae85u;
    }
  }
};

}  // namespace megafsdp
