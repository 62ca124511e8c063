// Copies past the caches, for lines that are written whole and not read soon: a plain store would
// first read the line that it changes.
//
//   bytes to the next 16 | pieces of 16 to the next line | whole lines | pieces of 16 | rest
//        plain stores           streamed                    streamed       streamed     plain
//
// Lines filled by one or two stores reach twice the bandwidth of lines filled by four. Only the
// fence orders streamed stores.
#pragma once

#include <cstdint>

#include "simd.h"

#if defined(__linux__)
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megafsdp {

constexpr int64_t kLineNbytes = 64;

// Larger buffers are streamed. It is the size of the last-level cache, or the part of a large one
// that is near a core. Smaller outputs are likely to be read from the cache again.
inline int64_t cached_nbytes() {
  constexpr int64_t kMost = int64_t{32} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  static const int64_t nbytes = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (nbytes > 0 && nbytes < kMost) return nbytes;
#endif
  return kMost;
}

#if defined(__x86_64__)

// Each copies whole lines to where a line begins.
inline void stream_lines_scalar(const char* from, char* to, int64_t nbytes) {
  for (int64_t byte = 0; byte < nbytes; byte += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + byte),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + byte)));
  }
}

MEGAFSDP_AVX2 inline void stream_lines_avx2(const char* from, char* to, int64_t nbytes) {
  for (int64_t byte = 0; byte < nbytes; byte += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + byte),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + byte)));
  }
}

MEGAFSDP_AVX512 inline void stream_lines_avx512(const char* from, char* to, int64_t nbytes) {
  for (int64_t byte = 0; byte < nbytes; byte += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + byte), _mm512_loadu_si512(from + byte));
  }
}

template <Simd level>
MEGAFSDP_INLINE void stream_lines(const char* from, char* to, int64_t nbytes) {
  if constexpr (level == Simd::kAvx512) {
    stream_lines_avx512(from, to, nbytes);
  } else if constexpr (level == Simd::kAvx2) {
    stream_lines_avx2(from, to, nbytes);
  } else {
    stream_lines_scalar(from, to, nbytes);
  }
}

MEGAFSDP_INLINE bool begins(const void* address, uintptr_t nbytes) {
  return reinterpret_cast<uintptr_t>(address) % nbytes == 0;
}

#endif

// Copies elements; addresses need only be aligned to an element.
template <Simd level, typename T>
MEGAFSDP_INLINE void stream(const T* from, T* to, int64_t count) {
  int64_t i = 0;
#if defined(__x86_64__)
  constexpr int64_t kPieceNumel = 16 / sizeof(T);
  constexpr int64_t kLineNumel = kLineNbytes / sizeof(T);
  const auto piece = [&] {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    i += kPieceNumel;
  };
  while (i < count && !begins(to + i, 16)) to[i] = from[i], ++i;
  while (i + kPieceNumel <= count && !begins(to + i, kLineNbytes)) piece();
  if (const int64_t lines = (count - i) / kLineNumel * kLineNumel; lines > 0) {
    stream_lines<level>(reinterpret_cast<const char*>(from + i), reinterpret_cast<char*>(to + i),
                        lines * static_cast<int64_t>(sizeof(T)));
    i += lines;
  }
  while (i + kPieceNumel <= count) piece();
#endif
  while (i < count) to[i] = from[i], ++i;
}

// Makes what this thread has streamed visible before what it stores from here on.
inline void fence_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace megafsdp
