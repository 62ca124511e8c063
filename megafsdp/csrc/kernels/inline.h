// What marks a function that every kernel inlines, on a CUDA compiler one for both sides; and a
// loop over an array that must not be indexed at run time, which on a GPU would put it into memory.
#pragma once

#if defined(__CUDACC__)
#define MEGAFSDP_INLINE __host__ __device__ __forceinline__
#define MEGAFSDP_UNROLL _Pragma("unroll")
#else
#define MEGAFSDP_INLINE inline __attribute__((always_inline))
#define MEGAFSDP_UNROLL
#endif
