// Maxima that many threads raise.
//
// On the host, where a test runs one thread after another, it is a comparison.
#pragma once

#include <cstdint>

#include "../kernels/float8.h"

namespace megafsdp {

#if defined(__CUDA_ARCH__)
// One atomic operation for all lanes of a warp with the same address, and none if the maximum is
// already as high: thousands of warps may raise the maximum of a matrix.
template <typename Maximum>
MEGAFSDP_INLINE void raise(Maximum* maximum, uint32_t bits) {
  const uint32_t wanted = bits > kInfinityBits ? kNanBits : bits;
  const auto address = reinterpret_cast<unsigned long long>(maximum);
  const unsigned same = __match_any_sync(__activemask(), address);
  const uint32_t largest = __reduce_max_sync(same, wanted);
  const bool is_first = (threadIdx.x & 31) == __ffs(same) - 1;
  if (!is_first || largest <= static_cast<uint32_t>(*static_cast<volatile Maximum*>(maximum)))
    return;
  atomicMax(maximum, static_cast<Maximum>(largest));
}

// Like raise(), in the memory that a block shares: atomic operations are cheap there.
template <typename Maximum>
MEGAFSDP_INLINE void raise_shared(Maximum* maximum, uint32_t bits) {
  atomicMax(maximum, static_cast<Maximum>(bits));
}
#else
template <typename Maximum>
MEGAFSDP_INLINE void raise_shared(Maximum* maximum, uint32_t bits) {
  if (static_cast<uint32_t>(*maximum) < bits) *maximum = static_cast<Maximum>(bits);
}

template <typename Maximum>
MEGAFSDP_INLINE void raise(Maximum* maximum, uint32_t bits) {
  raise_shared(maximum, bits > kInfinityBits ? kNanBits : bits);
}
#endif

}  // namespace megafsdp
