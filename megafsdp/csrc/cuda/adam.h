// Launches of the optimizer's kernels; without CUDA headers, so that any host compiler can call
// them.
//
// Each function returns null, or what CUDA says went wrong, in words that live as long as the
// program. A launch returns before its kernels have run; streams are handles of the CUDA runtime.
#pragma once

#include <cstdint>

#include "../kernels/adam_buffers.h"
#include "late_constants.h"

namespace megafsdp {

// What a step of Adam has besides its buffers; a launch for each table of adam_table.h, nearly
// always one. grad_scale and found_inf are fp32 scalars on the device or null; without grad_scale
// the buffers' own factor counts, and no buffer is touched if found_inf is not zero. If constants
// are late, late_hypers has one for each segment, and a launch before the others counts steps and
// writes the constants to late_constants on the device.
struct CudaAdamLaunch {
  const AdamSegment* segments;
  int64_t num_segments;
  const LateHyper* late_hypers;
  AdamConstants* late_constants;
  const float* grad_scale;
  const float* found_inf;
  bool flush_denormals;
  int device;
  void* stream;
};

// One buffer of values of one dtype.
struct SquareSumValues {
  const void* values;
  int64_t numel;
  Dtype dtype;
};

// sums are as many doubles as there are buffers, scratch the sum of their
// square_sum_scratch_numel().
struct CudaSquareSumLaunch {
  const SquareSumValues* buffers;
  int64_t num_buffers;
  double* sums;
  double* scratch;
  int device;
  void* stream;
};

}  // namespace megafsdp

extern "C" {

const char* megafsdp_cuda_adam(const megafsdp::AdamBuffers* buffers,
                               const megafsdp::CudaAdamLaunch* launch);

const char* megafsdp_cuda_square_sums(const megafsdp::CudaSquareSumLaunch* launch);

// Says why the kernels cannot run on a device.
const char* megafsdp_cuda_check_device(int device);

const char* megafsdp_cuda_device_count(int* count);
}
