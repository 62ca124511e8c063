// Adam in one launch over flat buffers. Blocks take tiles in turn; adam_tile.h says what a thread
// does, kernels/adam_formula.h what happens to an element.
//
// Every operation is an intrinsic that rounds to nearest even once, so neither contraction nor the
// compiler's -ftz changes a bit. Subnormal numbers are flushed by kernels/flushing.h and not by
// -ftz=true: nothing says whether a GPU looks at a result before or after rounding it.
#include <cuda_runtime.h>

#include "adam.h"
#include "adam_tile.h"

namespace megafsdp {
namespace {

struct DeviceMath {
  static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
  static __device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
  static __device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
  static __device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
  static __device__ __forceinline__ float root_over(float a, float b) {
    return __fdiv_rn(__fsqrt_rn(a), b);
  }
  static __device__ __forceinline__ float fma(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
  }
  // A product with one is exact, so nothing hangs on when the flush happens.
  static __device__ __forceinline__ float take(float a) {
    float flushed;
    asm("mul.rn.ftz.f32 %0, %1, 0f3F800000;" : "=f"(flushed) : "f"(a));
    return flushed;
  }
};

struct KernelArguments {
  AdamBuffers buffers;
  int64_t numel;
  const float* grad_scale;
  const float* found_inf;
  const AdamSegment* far_segments;
  int64_t num_segments;
  bool is_aligned;
  AdamSegment near_segments[kNearSegments];
};

template <typename Math, typename Grad, typename State, typename Weight>
__global__ void __launch_bounds__(kThreads)
    adam_kernel(const __grid_constant__ KernelArguments arguments) {
  if (arguments.found_inf != nullptr && *arguments.found_inf != 0.0f) return;
  const bool has_device_scale = arguments.grad_scale != nullptr;
  const float scale = has_device_scale ? *arguments.grad_scale : arguments.buffers.grad_scale;
  const bool is_far = arguments.far_segments != nullptr;
  const AdamSegment* segments = is_far ? arguments.far_segments : arguments.near_segments;
  const AdamTask task{arguments.buffers,      arguments.numel,   segments,
                      arguments.num_segments, Math::take(scale), arguments.is_aligned};
  constexpr int64_t kTileNumel = kThreads * kVectorNumel<Grad, State, Weight>;
  const int64_t num_tiles = (arguments.numel + kTileNumel - 1) / kTileNumel;
  int64_t segment = 0;
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    segment = adam_tile<Math, Grad, State, Weight>(task, tile, threadIdx.x, segment);
  }
}

using Kernel = void (*)(KernelArguments);

template <typename Math, typename Grad, typename State>
Kernel kernel_of_weight(const AdamBuffers& buffers) {
  return buffers.remainder == nullptr ? adam_kernel<Math, Grad, State, float>
                                      : adam_kernel<Math, Grad, State, uint16_t>;
}

template <typename Math, typename Grad>
Kernel kernel_of_state(const AdamBuffers& buffers) {
  return buffers.state_dtype == Dtype::kFloat32 ? kernel_of_weight<Math, Grad, float>(buffers)
                                                : kernel_of_weight<Math, Grad, uint16_t>(buffers);
}

template <typename Math>
Kernel kernel_of(const AdamBuffers& buffers) {
  return buffers.grad_dtype == Dtype::kFloat32 ? kernel_of_state<Math, float>(buffers)
                                               : kernel_of_state<Math, uint16_t>(buffers);
}

cudaError_t launch_adam(const AdamBuffers& buffers, const CudaAdamLaunch& launch) {
  // Blocks of one processor at a time: enough to fill it at any number of registers.
  constexpr int64_t kBlocksPerProcessor = 8;
  if (cudaError_t error = cudaSetDevice(launch.device)) return error;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  KernelArguments arguments{buffers,
                            launch.numel,
                            launch.grad_scale,
                            launch.found_inf,
                            nullptr,
                            launch.num_segments,
                            has_vector_addresses(buffers)};
  if (launch.num_segments > kNearSegments) {
    // Memory that is not page-locked is read before the call returns.
    if (cudaError_t error = cudaMemcpyAsync(launch.table, launch.segments,
                                            launch.num_segments * sizeof(AdamSegment),
                                            cudaMemcpyHostToDevice, stream)) {
      return error;
    }
    arguments.far_segments = static_cast<const AdamSegment*>(launch.table);
  } else {
    for (int64_t i = 0; i < launch.num_segments; ++i) {
      arguments.near_segments[i] = launch.segments[i];
    }
  }
  int num_processors = 0;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, launch.device)) {
    return error;
  }
  const int64_t tile_numel = tile_numel_of(buffers);
  const int64_t num_tiles = (launch.numel + tile_numel - 1) / tile_numel;
  const int64_t most_blocks = num_processors * kBlocksPerProcessor;
  const auto num_blocks = static_cast<unsigned>(num_tiles < most_blocks ? num_tiles : most_blocks);
  const Kernel kernel = launch.flush_denormals ? kernel_of<Flushing<FastZeros<DeviceMath>>>(buffers)
                                               : kernel_of<Keeping<FastZeros<DeviceMath>>>(buffers);
  kernel<<<num_blocks, kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

const char* words_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace
}  // namespace megafsdp

extern "C" {

const char* megafsdp_cuda_adam(const megafsdp::AdamBuffers* buffers,
                               const megafsdp::CudaAdamLaunch* launch) {
  return megafsdp::words_of(megafsdp::launch_adam(*buffers, *launch));
}

const char* megafsdp_cuda_check_device(int device) {
  using namespace megafsdp;
  if (cudaError_t error = cudaSetDevice(device)) return words_of(error);
  cudaFuncAttributes attributes;
  return words_of(
      cudaFuncGetAttributes(&attributes, adam_kernel<Keeping<FastZeros<DeviceMath>>, float, float, float>));
}

const char* megafsdp_cuda_device_count(int* count) {
  return megafsdp::words_of(cudaGetDeviceCount(count));
}
}
