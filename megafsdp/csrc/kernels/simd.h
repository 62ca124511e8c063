// Instruction sets: which one a call runs on, and the attributes that compile a function for each.
//
// A kernel is one template of plain loops, forced inline into one function per level; the
// function's target attribute makes the compiler vectorise the loops for that level. Contraction of
// a multiply and an add into one rounding is off for the whole build, so all levels give the same
// bits.
#pragma once

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "inline.h"

#if defined(__x86_64__)
#define MEGAFSDP_AVX2 __attribute__((target("avx2,fma")))
#define MEGAFSDP_AVX512 \
  __attribute__((target("fma,avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")))
#else
#define MEGAFSDP_AVX2
#define MEGAFSDP_AVX512
#endif

// For a loop whose iterations are independent, even if the compiler cannot prove it.
#if defined(__clang__)
#define MEGAFSDP_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define MEGAFSDP_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace megafsdp {

enum class Simd { kScalar, kAvx2, kAvx512 };

// Returns the names of the levels that this processor has, weakest first.
inline std::vector<std::string> simd_levels() {
  std::vector<std::string> names = {"scalar"};
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) return names;
  if (__builtin_cpu_supports("avx2")) names.push_back("avx2");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    names.push_back("avx512");
  }
#endif
  return names;
}

// Returns the level to run on: the one that MEGAFSDP_SIMD forces, else the strongest there is.
// Throws std::invalid_argument if the forced one is unknown or this processor lacks it.
inline Simd simd_level() {
  static const std::vector<std::string> names = simd_levels();
  const char* forced = std::getenv("MEGAFSDP_SIMD");
  if (forced == nullptr || *forced == '\0') return static_cast<Simd>(names.size() - 1);
  std::string known;
  for (size_t level = 0; level < names.size(); ++level) {
    if (names[level] == forced) return static_cast<Simd>(level);
    known += (level == 0 ? "" : ", ") + names[level];
  }
  throw std::invalid_argument("Expected one of " + known + ", got '" + forced +
                              "'. In the environment variable MEGAFSDP_SIMD. Unset it, or name a "
                              "level that this processor has.");
}

template <typename Job>
void run_scalar(const Job& job) {
  job();
}

template <typename Job>
MEGAFSDP_AVX2 void run_avx2(const Job& job) {
  job();
}

template <typename Job>
MEGAFSDP_AVX512 void run_avx512(const Job& job) {
  job();
}

// Calls a job whose operator() is forced inline, compiled for a level.
template <typename Job>
void run_at(Simd level, const Job& job) {
  switch (level) {
    case Simd::kScalar:
      return run_scalar(job);
    case Simd::kAvx2:
      return run_avx2(job);
    case Simd::kAvx512:
      return run_avx512(job);
  }
}

}  // namespace megafsdp
