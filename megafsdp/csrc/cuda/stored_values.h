// Single values as they are stored, in a type that is known at run time; for both compilers.
#pragma once

#include <cstdint>

#include "../kernels/adam_buffers.h"
#include "../kernels/float16.h"

namespace megafsdp {

// Decodes a stored value: uint16_t stands for bf16 and fp16.
MEGAFSDP_INLINE float decoded(float value, Dtype) { return value; }

MEGAFSDP_INLINE float decoded(uint16_t bits, Dtype dtype) {
  return dtype == Dtype::kFloat16 ? to_float(Float16{bits}) : to_float(BFloat16{bits});
}

MEGAFSDP_INLINE void encode(float value, Dtype, float& to) { to = value; }

MEGAFSDP_INLINE void encode(float value, Dtype dtype, uint16_t& to) {
  to = dtype == Dtype::kFloat16 ? FromFloat<Float16>::convert(value).bits
                                : FromFloat<BFloat16>::convert(value).bits;
}

}  // namespace megafsdp
