// Adam over flat buffers, in one launch for each table of segments. Blocks take tiles in turn;
// adam_tile.h says what a thread does, kernels/adam_formula.h what happens to an element.
//
// Every operation is an intrinsic that rounds to nearest even once, so neither contraction nor the
// compiler's -ftz changes a bit. kernels/flushing.h flushes subnormal numbers, not -ftz=true: it is
// not specified whether a GPU looks at a result before or after rounding it.
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
  // A product with one is exact, so it does not matter when the flush happens.
  static __device__ __forceinline__ float take(float a) {
    float flushed;
    asm("mul.rn.ftz.f32 %0, %1, 0f3F800000;" : "=f"(flushed) : "f"(a));
    return flushed;
  }
};

struct KernelArguments {
  AdamBuffers buffers;
  const float* grad_scale;
  const float* found_inf;
  const AdamConstants* late_constants;
  TileRange tiles;
  bool is_aligned;
  AdamTable table;
};
static_assert(sizeof(KernelArguments) <= 4096, "what devices of all drivers take");

template <typename Math, typename Grad, typename State, typename Weight>
__global__ void __launch_bounds__(kThreads)
    adam_kernel(const __grid_constant__ KernelArguments arguments) {
  if (arguments.found_inf != nullptr && *arguments.found_inf != 0.0f) return;
  const bool has_device_scale = arguments.grad_scale != nullptr;
  const float scale = has_device_scale ? *arguments.grad_scale : arguments.buffers.grad_scale;
  // Each block copies the constants to shared memory: late ones are not among the arguments.
  __shared__ AdamConstants constants[kMostRows];
  const AdamConstants* late = arguments.late_constants;
  const AdamConstants* from = late == nullptr ? arguments.table.constants : late;
  if (threadIdx.x < arguments.table.num_constants) constants[threadIdx.x] = from[threadIdx.x];
  __syncthreads();
  const AdamTask task{arguments.buffers, arguments.table.rows, arguments.table.num_rows,
                      constants,         Math::take(scale),    arguments.is_aligned};
  int row = 0;
  for (int64_t tile = arguments.tiles.start + blockIdx.x; tile < arguments.tiles.stop;
       tile += gridDim.x) {
    row = adam_tile<Math, Grad, State, Weight>(task, tile, threadIdx.x, row);
  }
}

struct LateArguments {
  LateHyper hypers[kMostConstants];
  int count;
  const float* found_inf;
  bool flushes;
  AdamConstants* constants;
};

__global__ void late_constants_kernel(const __grid_constant__ LateArguments arguments) {
  const int i = threadIdx.x;
  if (i >= arguments.count) return;
  const bool skips = arguments.found_inf != nullptr && *arguments.found_inf != 0.0f;
  arguments.constants[i] = late_constants(arguments.hypers[i], skips, arguments.flushes);
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

cudaError_t launch_late_constants(const CudaAdamLaunch& launch, cudaStream_t stream) {
  for (int64_t first = 0; first < launch.num_segments; first += kMostConstants) {
    const int64_t left = launch.num_segments - first;
    LateArguments arguments{};
    arguments.count = left < kMostConstants ? static_cast<int>(left) : kMostConstants;
    for (int i = 0; i < arguments.count; ++i) {
      arguments.hypers[i] = launch.late_hypers[first + i];
    }
    arguments.found_inf = launch.found_inf;
    arguments.flushes = launch.flush_denormals;
    arguments.constants = launch.late_constants + first;
    late_constants_kernel<<<1, kMostConstants, 0, stream>>>(arguments);
    if (cudaError_t error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
}

cudaError_t launch_adam(const AdamBuffers& buffers, const CudaAdamLaunch& launch) {
  // Blocks for each multiprocessor: enough to fill it at any number of registers.
  constexpr int64_t kBlocksPerProcessor = 8;
  if (cudaError_t error = cudaSetDevice(launch.device)) return error;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  int num_processors = 0;
  if (cudaError_t error =
          cudaDeviceGetAttribute(&num_processors, cudaDevAttrMultiProcessorCount, launch.device)) {
    return error;
  }
  const bool are_late = launch.late_hypers != nullptr;
  if (are_late) {
    if (cudaError_t error = launch_late_constants(launch, stream)) return error;
  }
  const Kernel kernel = launch.flush_denormals ? kernel_of<Flushing<FastZeros<DeviceMath>>>(buffers)
                                               : kernel_of<Keeping<FastZeros<DeviceMath>>>(buffers);
  const int64_t most_blocks = num_processors * kBlocksPerProcessor;
  for (int64_t first = 0; first < launch.num_segments;) {
    KernelArguments arguments{buffers, launch.grad_scale, launch.found_inf};
    if (are_late) arguments.late_constants = launch.late_constants + first;
    first = fill_table(launch.segments, launch.num_segments, first, are_late, arguments.table);
    if (arguments.table.num_rows == 0) continue;
    arguments.is_aligned = has_vector_addresses(buffers);
    arguments.tiles = tiles_of(arguments.table, tile_numel_of(buffers));
    const int64_t num_tiles = arguments.tiles.stop - arguments.tiles.start;
    const auto num_blocks =
        static_cast<unsigned>(num_tiles < most_blocks ? num_tiles : most_blocks);
    kernel<<<num_blocks, kThreads, 0, stream>>>(arguments);
    if (cudaError_t error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
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
  return words_of(cudaFuncGetAttributes(
      &attributes, adam_kernel<Keeping<FastZeros<DeviceMath>>, float, float, float>));
}

const char* megafsdp_cuda_device_count(int* count) {
  return megafsdp::words_of(cudaGetDeviceCount(count));
}
}
