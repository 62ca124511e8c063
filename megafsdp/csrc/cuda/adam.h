// Launches of the optimizer's kernels; without CUDA headers, so that any host compiler calls them.
//
// Each function returns null, or what CUDA says went wrong, in words that live as long as the
// program. A launch returns before its kernels have run; streams are handles of the CUDA runtime.
#pragma once

#include <cstdint>

#include "../kernels/adam_buffers.h"

namespace megafsdp {

// Tables of up to so many segments travel with the launch; longer ones need room on the device.
constexpr int64_t kNearSegments = 32;

// What a launch of Adam has besides its buffers. grad_scale and found_inf are fp32 scalars on the
// device or null; without grad_scale the buffers' own factor counts, and no buffer is touched where
// found_inf is not zero. table is room for the segments, or null for kNearSegments or fewer.
struct CudaAdamLaunch {
  int64_t numel;
  const AdamSegment* segments;
  int64_t num_segments;
  void* table;
  const float* grad_scale;
  const float* found_inf;
  bool flush_denormals;
  int device;
  void* stream;
};

// Values of one dtype; sum is one double, scratch square_sum_scratch_numel() of them.
struct CudaSquareSumLaunch {
  const void* values;
  int64_t numel;
  Dtype dtype;
  double* sum;
  double* scratch;
  int device;
  void* stream;
};

}  // namespace megafsdp

extern "C" {

const char* megafsdp_cuda_adam(const megafsdp::AdamBuffers* buffers,
                               const megafsdp::CudaAdamLaunch* launch);

const char* megafsdp_cuda_square_sum(const megafsdp::CudaSquareSumLaunch* launch);

// Says why the kernels cannot run on a device.
const char* megafsdp_cuda_check_device(int device);

const char* megafsdp_cuda_device_count(int* count);
}
