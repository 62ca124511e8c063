// A thread's neighbouring elements, loaded and stored by the widest instructions: 16 bytes each, or
// the whole vector if it is smaller.
//
// The file compiles for the host too.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "../kernels/inline.h"

namespace megafsdp {

constexpr int64_t kVectorNbytes = 16;

template <typename T, int kNumel>
struct alignas(kNumel * sizeof(T)) Vector {
  T at[kNumel];
};

// Tells whether an address is aligned for such a vector; null is.
template <typename Values>
inline bool may_be_at(const void* address) {
  constexpr uintptr_t kAlignment = sizeof(Values) < kVectorNbytes ? sizeof(Values) : kVectorNbytes;
  return reinterpret_cast<uintptr_t>(address) % kAlignment == 0;
}

#if defined(__CUDA_ARCH__)
template <typename Values>
using Raw = std::conditional_t<
    sizeof(Values) % kVectorNbytes == 0, uint4,
    std::conditional_t<sizeof(Values) == 8, uint2,
                       std::conditional_t<sizeof(Values) == 4, uint32_t, uint16_t>>>;

template <typename Values>
constexpr int kRawParts = sizeof(Values) / sizeof(Raw<Values>);

template <typename Values, bool kIsOnce>
MEGAFSDP_INLINE Values load_parts(const void* base, int64_t vector) {
  const auto* from = static_cast<const Raw<Values>*>(base) + vector * kRawParts<Values>;
  Raw<Values> raw[kRawParts<Values>];
  MEGAFSDP_UNROLL
  for (int i = 0; i < kRawParts<Values>; ++i) raw[i] = kIsOnce ? __ldcs(from + i) : from[i];
  Values values;
  memcpy(&values, raw, sizeof values);
  return values;
}

template <typename Values>
MEGAFSDP_INLINE Values load(const void* base, int64_t vector) {
  return load_parts<Values, false>(base, vector);
}

// Like load(), for data that is read once: the caches evict it first.
template <typename Values>
MEGAFSDP_INLINE Values load_once(const void* base, int64_t vector) {
  return load_parts<Values, true>(base, vector);
}

// In PTX: the compiler would split a plain assignment into stores of elements, each of which fills
// a part of a sector, and the intrinsic for 16-byte stores orders memory more strongly than needed.
MEGAFSDP_INLINE void store_raw(void* to, uint4 raw) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w)
               : "memory");
}

MEGAFSDP_INLINE void store_raw(void* to, uint2 raw) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(raw.x),
               "r"(raw.y)
               : "memory");
}

MEGAFSDP_INLINE void store_raw(void* to, uint32_t raw) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(__cvta_generic_to_global(to)), "r"(raw) : "memory");
}

template <typename Values>
MEGAFSDP_INLINE void store(void* base, int64_t vector, const Values& values) {
  Raw<Values> raw[kRawParts<Values>];
  memcpy(raw, &values, sizeof values);
  auto* to = static_cast<Raw<Values>*>(base) + vector * kRawParts<Values>;
  MEGAFSDP_UNROLL
  for (int i = 0; i < kRawParts<Values>; ++i) store_raw(to + i, raw[i]);
}
#else
// On the host, throws an exception where a GPU would trap.
template <typename Values>
inline void check_vector_at(const void* base) {
  if (!may_be_at<Values>(base)) throw std::logic_error("a vector is not aligned");
}

template <typename Values>
MEGAFSDP_INLINE Values load(const void* base, int64_t vector) {
  check_vector_at<Values>(base);
  Values values;
  std::memcpy(&values, static_cast<const char*>(base) + vector * sizeof values, sizeof values);
  return values;
}

template <typename Values>
MEGAFSDP_INLINE Values load_once(const void* base, int64_t vector) {
  return load<Values>(base, vector);
}

template <typename Values>
MEGAFSDP_INLINE void store(void* base, int64_t vector, const Values& values) {
  check_vector_at<Values>(base);
  std::memcpy(static_cast<char*>(base) + vector * sizeof values, &values, sizeof values);
}
#endif

// Returns four of eight bytes: the low three bits of each of the low four hexadecimal digits of
// places select one.
#if defined(__CUDA_ARCH__)
MEGAFSDP_INLINE uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t places) {
  return __byte_perm(low, high, places);
}
#else
MEGAFSDP_INLINE uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t places) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    picked |= static_cast<uint32_t>(bytes >> 8 * (places >> 4 * i & 7) & 0xff) << 8 * i;
  }
  return picked;
}
#endif

}  // namespace megafsdp
