// Sum of N shards, element by element, in rank order.
//
// For each element, in the accumulator's type:
//   sum = shard[0]; sum += shard[1]; ...; sum += shard[N-1]; sum *= scale;
//   if accumulate: sum += out
// and out becomes sum, rounded once to its own type. Every operation rounds separately.
#pragma once

#include <cstdint>
#include <type_traits>

#include "float16.h"
#include "simd.h"

namespace megafsdp {

// Double if either side is double, else float.
template <typename In, typename Out>
using Accumulator =
    std::conditional_t<std::is_same_v<In, double> || std::is_same_v<Out, double>, double, float>;

template <typename To, typename From>
MEGAFSDP_INLINE To convert(From value) {
  if constexpr (std::is_same_v<From, double>) {
    if constexpr (std::is_same_v<To, double>) {
      return value;
    } else {
      return FromFloat<To>::convert(static_cast<float>(value));
    }
  } else if constexpr (std::is_same_v<To, double>) {
    return static_cast<double>(to_float(value));
  } else {
    return FromFloat<To>::convert(to_float(value));
  }
}

template <typename In, typename Out>
struct ShardSum {
  const In* const* shards;
  int64_t num_shards;
  Out* out;
  int64_t numel;
  double scale;
  bool accumulate;
};

// A block's sums stay in the first-level cache while each shard is read once, in order. All shards
// of a block are read before it is written, so out may be one of the shards.
template <typename In, typename Out>
MEGAFSDP_INLINE void shard_sum(const ShardSum<In, Out>& job) {
  using Sum = Accumulator<In, Out>;
  constexpr int64_t kBlockNumel = 1024;
  const Sum scale = static_cast<Sum>(job.scale);
  Sum sums[kBlockNumel];
  for (int64_t start = 0; start < job.numel; start += kBlockNumel) {
    const int64_t count = job.numel - start < kBlockNumel ? job.numel - start : kBlockNumel;
    const In* first = job.shards[0] + start;
    for (int64_t i = 0; i < count; ++i) sums[i] = convert<Sum>(first[i]);
    for (int64_t rank = 1; rank < job.num_shards; ++rank) {
      const In* shard = job.shards[rank] + start;
      for (int64_t i = 0; i < count; ++i) sums[i] += convert<Sum>(shard[i]);
    }
    Out* out = job.out + start;
    if (job.accumulate) {
      for (int64_t i = 0; i < count; ++i) {
        out[i] = convert<Out>(sums[i] * scale + convert<Sum>(out[i]));
      }
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = convert<Out>(sums[i] * scale);
    }
  }
}

template <typename In, typename Out>
void shard_sum_scalar(const ShardSum<In, Out>& job) {
  shard_sum(job);
}

template <typename In, typename Out>
MEGAFSDP_AVX2 void shard_sum_avx2(const ShardSum<In, Out>& job) {
  shard_sum(job);
}

template <typename In, typename Out>
MEGAFSDP_AVX512 void shard_sum_avx512(const ShardSum<In, Out>& job) {
  shard_sum(job);
}

template <typename In, typename Out>
void shard_sum_at(Simd level, const ShardSum<In, Out>& job) {
  switch (level) {
    case Simd::kScalar:
      return shard_sum_scalar(job);
    case Simd::kAvx2:
      return shard_sum_avx2(job);
    case Simd::kAvx512:
      return shard_sum_avx512(job);
  }
}

}  // namespace megafsdp
