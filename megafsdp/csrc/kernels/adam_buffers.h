// What one step of Adam works on, for any processor.
#pragma once

#include <cstdint>

#include "adam_formula.h"

namespace megafsdp {

enum class Dtype { kNone, kFloat32, kBFloat16, kFloat16 };

MEGAFSDP_INLINE int64_t itemsize_of(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

struct AdamSegment {
  int64_t start;
  int64_t stop;
  AdamConstants constants;
};

// Addresses of flat buffers of one length. With a remainder, weight holds bf16 and remainder the
// low 16 bits; else weight holds fp32 and remainder is null. copy_out is null for kNone.
//
// Only a CPU uses the last five. With all three new ones the step is out of place: it only reads
// the fp32 weights and moments. With streams, outputs that are not read (the new ones and copy_out)
// are stored past the caches; with prefetches, tiles are prefetched before they are read.
struct AdamBuffers {
  void* weight;
  int16_t* remainder;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* copy_out;
  Dtype grad_dtype;
  Dtype state_dtype;
  Dtype copy_out_dtype;
  float grad_scale;
  bool streams = false;
  bool prefetches = false;
  float* new_weight = nullptr;
  float* new_exp_avg = nullptr;
  float* new_exp_avg_sq = nullptr;
};

}  // namespace megafsdp
