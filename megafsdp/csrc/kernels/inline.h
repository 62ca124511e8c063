// Macros for a function that every kernel inlines (with a CUDA compiler, for host and device); for
// a loop over an array that must be unrolled, as indexing at run time would put the array into a
// GPU's memory; and for a loop that runs seldom and should stay a loop.
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
