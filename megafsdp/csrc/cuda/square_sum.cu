// Sums of squares in double of many buffers, in the order of kernels/square_sum.h.
//
// A block of threads takes kBlocksAtOnce blocks of values, a thread one lane of one of them; then
// each further launch adds runs of sums, until each buffer has one. The host never waits.
#include <cuda_runtime.h>

#include "adam.h"
#include "square_lane.h"

namespace megafsdp {
namespace {

constexpr int kBlocksAtOnce = 16;
constexpr int kSquareThreads = kBlocksAtOnce * kSquareLanes;

__global__ void __launch_bounds__(kSquareThreads)
    block_sums_kernel(const __grid_constant__ SquareTable table) {
  const int lane = threadIdx.x % kSquareLanes, place = threadIdx.x / kSquareLanes;
  const int64_t number = int64_t{blockIdx.x} * kBlocksAtOnce + place;
  const bool is_there = number < table.num_blocks;
  const SquareRow& row = row_of(table.rows, table.count, number);
  const int64_t block = number - row.first;
  __shared__ double lanes[kBlocksAtOnce][kSquareLanes];
  lanes[place][lane] = is_there ? lane_sum(row, block, lane) : 0.0;
  __syncthreads();
  if (lane == 0 && is_there) {
    double total = 0.0;
    MEGAFSDP_UNROLL
    for (int k = 0; k < kSquareLanes; ++k) total += lanes[place][k];
    row.sums[block] = total;
  }
}

__global__ void __launch_bounds__(kSquareRun)
    add_runs_kernel(const __grid_constant__ RunTable table) {
  __shared__ double run[kSquareRun];
  const RunRow& row = row_of(table.rows, table.count, blockIdx.x);
  const int64_t number = blockIdx.x - row.first, start = number * kSquareRun;
  const int64_t left = row.count - start;
  const int length = left < kSquareRun ? static_cast<int>(left) : kSquareRun;
  if (threadIdx.x < length) run[threadIdx.x] = row.sums[start + threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    double total = 0.0;
    for (int k = 0; k < length; ++k) total += run[k];
    row.run_sums[number] = total;
  }
}

cudaError_t launch_square_sums(const CudaSquareSumLaunch& launch) {
  if (cudaError_t error = cudaSetDevice(launch.device)) return error;
  const auto stream = static_cast<cudaStream_t>(launch.stream);
  double* scratch = launch.scratch;
  for (int64_t first = 0; first < launch.num_buffers; first += kMostBuffers) {
    const int64_t left = launch.num_buffers - first;
    const int count = left < kMostBuffers ? static_cast<int>(left) : kMostBuffers;
    const SquareTable table = table_of(launch.buffers + first, count, scratch);
    const auto grid = static_cast<unsigned>(parts_of(table.num_blocks, kBlocksAtOnce));
    block_sums_kernel<<<grid, kSquareThreads, 0, stream>>>(table);
    if (cudaError_t error = cudaGetLastError()) return error;
    for (RunTable runs = runs_of(table, launch.sums + first); runs.count > 0;
         runs = runs_of(runs)) {
      const auto num_runs = static_cast<unsigned>(runs.num_runs);
      add_runs_kernel<<<num_runs, kSquareRun, 0, stream>>>(runs);
      if (cudaError_t error = cudaGetLastError()) return error;
    }
    for (int i = 0; i < count; ++i) {
      scratch += square_sum_scratch_numel(launch.buffers[first + i].numel);
    }
  }
  return cudaSuccess;
}

}  // namespace
}  // namespace megafsdp

extern "C" const char* megafsdp_cuda_square_sums(const megafsdp::CudaSquareSumLaunch* launch) {
  const cudaError_t error = megafsdp::launch_square_sums(*launch);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
