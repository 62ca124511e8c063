// What marks a function that every kernel inlines, on a CUDA compiler one for both sides; a loop
// over an array that must not be indexed at run time, which on a GPU would put it into memory; and
// a loop that runs seldom and should stay one.
#pragma once

#if defined(__CUDACC__)
#define MEGAFSDP_INLINE __host__ __device__ __forceinline__
#define MEGAFSDP_UNROLL _Pragma("unroll")
#define MEGAFSDP_ROLL _Pragma("unroll 1")
#else
#define MEGAFSDP_INLINE inline __attribute__((always_inline))
#define MEGAFSDP_UNROLL
#define MEGAFSDP_ROLL
#endif
