// Sum of squares in double, in the order of kernels/square_sum.h.
//
// A block of threads takes kBlocksAtOnce blocks of values, a thread one lane of one of them; then
// each launch adds runs of sums, until one is left. Nothing waits for the device.
#include <cuda_runtime.h>

#include "adam.h"
#include "square_lane.h"

namespace megafsdp {
namespace {

constexpr int kBlocksAtOnce = 16;
constexpr int kSquareThreads = kBlocksAtOnce * kSquareLanes;
template <typename T>
__global__ void __launch_bounds__(kSquareThreads)
    block_sums_kernel(const T* values, int64_t numel, double* sums) {
  const int lane = threadIdx.x % kSquareLanes, row = threadIdx.x / kSquareLanes;
  const int64_t block = int64_t{blockIdx.x} * kBlocksAtOnce + row;
  const bool is_there = block * kSquareBlockNumel < numel;
  __shared__ double lanes[kBlocksAtOnce][kSquareLanes];
  lanes[row][lane] = is_there ? lane_sum(values, numel, block, lane) : 0.0;
  __syncthreads();
  if (lane == 0 && is_there) {
    double total = 0.0;
    MEGAFSDP_UNROLL
    for (int k = 0; k < kSquareLanes; ++k) total += lanes[row][k];
    sums[block] = total;
  }
}

__global__ void __launch_bounds__(kSquareRun)
    add_runs_kernel(const double* sums, int64_t count, double* run_sums) {
  __shared__ double run[kSquareRun];
  const int64_t start = int64_t{blockIdx.x} * kSquareRun;
  const int64_t left = count - start;
  const int length = left < kSquareRun ? static_cast<int>(left) : kSquareRun;
  if (threadIdx.x < length) run[threadIdx.x] = sums[start + threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0.0;
    for (int k = 0; k < length; ++k) total += run[k];
    run_sums[blockIdx.x] = total;
  }
}

int64_t parts_of(int64_t count, int64_t part) { return (count + part - 1) / part; }

template <typename T>
void launch_block_sums(const CudaSquareSumLaunch& launch, int64_t num_blocks) {
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  const auto grid = static_cast<unsigned>(parts_of(num_blocks, kBlocksAtOnce));
  block_sums_kernel<<<grid, kSquareThreads, 0, stream>>>(static_cast<const T*>(launch.values),
                                                         launch.numel, launch.scratch);
}

cudaError_t launch_square_sum(const CudaSquareSumLaunch& launch) {
  if (cudaError_t error = cudaSetDevice(launch.device)) return error;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  int64_t count = parts_of(launch.numel, kSquareBlockNumel);
  switch (launch.dtype) {
    case Dtype::kBFloat16:
      launch_block_sums<BFloat16>(launch, count);
      break;
    case Dtype::kFloat16:
      launch_block_sums<Float16>(launch, count);
      break;
    default:
      launch_block_sums<float>(launch, count);
  }
  if (cudaError_t error = cudaGetLastError()) return error;
  const double* sums = launch.scratch;
  double* free_scratch = launch.scratch + count;
  do {
    const int64_t num_runs = parts_of(count, kSquareRun);
    double* run_sums = num_runs == 1 ? launch.sum : free_scratch;
    add_runs_kernel<<<static_cast<unsigned>(num_runs), kSquareRun, 0, stream>>>(sums, count,
                                                                                run_sums);
    if (cudaError_t error = cudaGetLastError()) return error;
    sums = run_sums;
    free_scratch += num_runs;
    count = num_runs;
  } while (count > 1);
  return cudaSuccess;
}

}  // namespace
}  // namespace megafsdp

extern "C" const char* megafsdp_cuda_square_sum(const megafsdp::CudaSquareSumLaunch* launch) {
  const cudaError_t error = megafsdp::launch_square_sum(*launch);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
