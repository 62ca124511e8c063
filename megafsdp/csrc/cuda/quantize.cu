// Maxima, scales, codes and values of tiles, and transposed codes. The headers named *_thread.h say
// what a thread does, kernels/scales.h and float8.h what happens to a value; here are launches, and
// what threads do with each other.
//
// -fmad=false and divisions that round once make the bits those of a CPU; subnormal numbers are
// computed, which is nvcc's default.
#include <cuda_runtime.h>

#include "quantize.h"
#include "quantize_plan.h"

namespace megafsdp {
namespace {

struct TileArgumentsOfKernel {
  FragmentTable table;
  Reading reading;
  ScalingKind scaling;
};
static_assert(sizeof(TileArgumentsOfKernel) <= 4096, "what devices of all drivers take");

template <typename Source>
__global__ void __launch_bounds__(kTileThreads)
    maxima_kernel(const __grid_constant__ TileArgumentsOfKernel arguments) {
  // A copy, so that stores do not make the compiler read it again.
  const FragmentRow row = row_of_item(arguments.table, blockIdx.x);
  tile_maxima<Source>(row, arguments.reading, blockIdx.x, threadIdx.x);
}

template <typename Element, typename Source>
__global__ void __launch_bounds__(kTileThreads)
    encode_kernel(const __grid_constant__ TileArgumentsOfKernel arguments) {
  const FragmentRow row = row_of_item(arguments.table, blockIdx.x);
  encode_tile<Element, Source>(row, arguments.scaling, arguments.reading, blockIdx.x, threadIdx.x);
}

template <typename Element, typename Out>
__global__ void __launch_bounds__(kTileThreads)
    decode_kernel(const __grid_constant__ TileArgumentsOfKernel arguments) {
  const FragmentRow row = row_of_item(arguments.table, blockIdx.x);
  decode_tile<Element, Out>(row, arguments.scaling, arguments.reading.dtype, blockIdx.x,
                            threadIdx.x);
}

__global__ void __launch_bounds__(kTableThreads)
    largest_kernel(const __grid_constant__ TableOfTables table) {
  raise_largest(row_of_item(table, blockIdx.x), blockIdx.x, threadIdx.x);
}

template <typename Element>
__global__ void __launch_bounds__(kTableThreads)
    fill_kernel(const __grid_constant__ TableOfTables table, ScalingKind scaling) {
  fill_places<Element>(row_of_item(table, blockIdx.x), scaling, blockIdx.x, threadIdx.x);
}

template <typename Element, typename Source>
__global__ void __launch_bounds__(kTileThreads)
    blocks_kernel(const __grid_constant__ BlockTask task) {
  const BlockThread<Element, Source> thread(task, blockIdx.x, threadIdx.x);
  BlockMaxima<Source> maxima = thread.maxima();
  // All lanes take part, including those without values.
  MEGAFSDP_ROLL
  for (uint32_t apart = 1; apart < task.lanes; apart *= 2) {
    MEGAFSDP_UNROLL
    for (uint32_t i = 0; i < maxima.kWords; ++i) {
      maxima.raise(i, __shfl_xor_sync(~0u, maxima.words[i], apart));
    }
  }
  const uint32_t lane = threadIdx.x & (task.lanes - 1);
  float factors[kBlockRows] = {};
  MEGAFSDP_ROLL
  for (uint32_t settled = 0; settled < kBlockRows; settled += task.lanes) {
    const uint32_t own = settled + lane;
    const uint32_t maximum = maxima.of_row(own, task.dtype);
    const float factor = own < kBlockRows ? thread.settle(task, own, maximum) : 0.0f;
    MEGAFSDP_UNROLL
    for (uint32_t i = 0; i < kBlockRows; ++i) {
      const float other = __shfl_sync(~0u, factor, i - settled, task.lanes);
      factors[i] = i >= settled && i - settled < task.lanes ? other : factors[i];
    }
  }
  MEGAFSDP_UNROLL
  for (int i = 0; i < kBlockRows; ++i) thread.finish(task, i, factors[i]);
}

template <typename Element, typename Source>
__global__ void __launch_bounds__(kTransposeThreads)
    encode_transposed_kernel(const __grid_constant__ EncodeTransposedTask task) {
  __shared__ EncodeTransposedShared shared;
  const EncodeTransposedThread<Element, Source> thread(task, blockIdx.x, threadIdx.x, shared);
  __syncthreads();
  thread.note_maxima(task, shared);
  __syncthreads();
  thread.share_factors(task, shared);
  __syncthreads();
  thread.share_codes_of(task, shared);
  __syncthreads();
  thread.write(task, shared);
}

template <int kCodesPerByte>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(const __grid_constant__ TransposeTask task) {
  __shared__ TransposeShared shared;
  const TransposeBlock block = transpose_block(task.grid, blockIdx.x, TransposeShared::kCols);
  share_loaded<kCodesPerByte>(task, block, threadIdx.x, shared);
  __syncthreads();
  write_transposed<kCodesPerByte>(task.grid, block, task.stores_vectors, threadIdx.x, shared,
                                  task.out);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), int64_t num_blocks, int num_threads,
                          const CudaTarget& target, const Arguments&... arguments) {
  if (num_blocks == 0) return cudaSuccess;
  if (num_blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<static_cast<unsigned>(num_blocks), num_threads, 0,
           static_cast<cudaStream_t>(target.stream)>>>(arguments...);
  return cudaGetLastError();
}

// Launches kernels on tables of the fragments.
template <typename Kernel, typename MakeRow>
cudaError_t launch_tiles(Kernel kernel, int64_t num_fragments, const MakeRow& make_row,
                         const Reading& reading, ScalingKind scaling, const CudaTarget& target) {
  return for_each_table<FragmentTable, kMostFragments>(
      num_fragments, make_row, [&](const FragmentTable& table) {
        const TileArgumentsOfKernel arguments{table, reading, scaling};
        return launch_kernel(kernel, table.num_items, kTileThreads, target, arguments);
      });
}

// Finds the largest maximum of each matrix of stacks, which have grid and maxima.
template <typename Stack>
cudaError_t launch_largest(const Stack* stacks, int64_t num_stacks, uint32_t* largest,
                           const CudaTarget& target) {
  return for_each_table<TableOfTables, kMostTables>(
      num_stacks,
      [&](int64_t i) {
        const ScaleTable table{stacks[i].grid, stacks[i].maxima, nullptr, nullptr, nullptr, 0};
        uint32_t* const own = largest;
        largest += stacks[i].grid.num_matrices;
        return laid_out(table, own);
      },
      [&](const TableOfTables& table) {
        return launch_kernel(largest_kernel, table.num_items, kTableThreads, target, table);
      });
}

cudaError_t launch_maxima(const CudaTileLaunch& launch) {
  const Reading reading{launch.dtype, launch.through};
  cudaError_t error = cudaSetDevice(launch.target.device);
  if (error) return error;
  visit_stored(launch.dtype, [&](auto source) {
    error = launch_tiles(
        maxima_kernel<decltype(source)>, launch.num_fragments,
        [&](int64_t i) { return row_of_values(launch.fragments[i], reading); }, reading,
        launch.scaling, launch.target);
  });
  return error;
}

cudaError_t launch_encode(const CudaTileLaunch& launch) {
  const Reading reading{launch.dtype, launch.through};
  cudaError_t error = cudaSetDevice(launch.target.device);
  if (error) return error;
  const bool has_two_levels = launch.scaling == ScalingKind::kTwoLevel;
  if (has_two_levels) {
    error = launch_largest(launch.fragments, launch.num_fragments, launch.largest, launch.target);
    if (error) return error;
  }
  const uint32_t* largest = launch.largest;
  const auto make_row = [&](int64_t i) {
    const FragmentRow row = row_of_codes(launch.fragments[i], launch, largest);
    if (has_two_levels) largest += launch.fragments[i].grid.num_matrices;
    return row;
  };
  visit_element(launch.element, [&](auto element) {
    visit_stored(launch.dtype, [&](auto source) {
      error = launch_tiles(encode_kernel<decltype(element), decltype(source)>, launch.num_fragments,
                           make_row, reading, launch.scaling, launch.target);
    });
  });
  return error;
}

cudaError_t launch_fill(const CudaTableLaunch& launch) {
  cudaError_t error = cudaSetDevice(launch.target.device);
  if (error) return error;
  const bool has_two_levels = launch.scaling == ScalingKind::kTwoLevel;
  if (has_two_levels) {
    error = launch_largest(launch.tables, launch.num_tables, launch.largest, launch.target);
    if (error) return error;
  }
  uint32_t* largest = launch.largest;
  const auto make_row = [&](int64_t i) {
    uint32_t* const own = has_two_levels ? largest : nullptr;
    if (has_two_levels) largest += launch.tables[i].grid.num_matrices;
    return laid_out(launch.tables[i], own);
  };
  visit_element(launch.element, [&](auto element) {
    error = for_each_table<TableOfTables, kMostTables>(
        launch.num_tables, make_row, [&](const TableOfTables& table) {
          return launch_kernel(fill_kernel<decltype(element)>, table.num_items, kTableThreads,
                               launch.target, table, launch.scaling);
        });
  });
  return error;
}

cudaError_t launch_decode(const CudaDecodeLaunch& launch) {
  cudaError_t error = cudaSetDevice(launch.target.device);
  if (error) return error;
  visit_element(launch.element, [&](auto element) {
    visit_stored(launch.dtype, [&](auto out) {
      error = launch_tiles(
          decode_kernel<decltype(element), decltype(out)>, 1,
          [&](int64_t) { return row_of_decoded(launch); }, Reading{launch.dtype, Dtype::kNone},
          launch.scaling, launch.target);
    });
  });
  return error;
}

cudaError_t launch_matrix(const CudaMatrixLaunch& launch) {
  cudaError_t error = cudaSetDevice(launch.target.device);
  if (error) return error;
  visit_float8(launch.element, [&](auto element) {
    visit_stored(launch.dtype, [&](auto source) {
      using Element = decltype(element);
      using Source = decltype(source);
      if (are_parts_of_rows(launch)) {
        const BlockTask task = block_task_of(launch);
        error = launch_kernel(blocks_kernel<Element, Source>, num_items_of(task), kTileThreads,
                              launch.target, task);
      } else {
        const EncodeTransposedTask task = transposed_task_of(launch);
        error = launch_kernel(encode_transposed_kernel<Element, Source>, task.grid.num_items,
                              kTransposeThreads, launch.target, task);
      }
    });
  });
  return error;
}

cudaError_t launch_transpose(const CudaTransposeLaunch& launch) {
  if (cudaError_t error = cudaSetDevice(launch.target.device)) return error;
  const TransposeTask task = transpose_task_of(launch);
  return launch_kernel(launch.codes_per_byte == 1 ? transpose_kernel<1> : transpose_kernel<2>,
                       task.grid.num_items, kTransposeThreads, launch.target, task);
}

const char* words_of(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace
}  // namespace megafsdp

extern "C" {

const char* megafsdp_cuda_tile_maxima(const megafsdp::CudaTileLaunch* launch) {
  return megafsdp::words_of(megafsdp::launch_maxima(*launch));
}

const char* megafsdp_cuda_encode_tiles(const megafsdp::CudaTileLaunch* launch) {
  return megafsdp::words_of(megafsdp::launch_encode(*launch));
}

const char* megafsdp_cuda_fill_tables(const megafsdp::CudaTableLaunch* launch) {
  return megafsdp::words_of(megafsdp::launch_fill(*launch));
}

const char* megafsdp_cuda_decode_tiles(const megafsdp::CudaDecodeLaunch* launch) {
  return megafsdp::words_of(megafsdp::launch_decode(*launch));
}

const char* megafsdp_cuda_encode_matrix(const megafsdp::CudaMatrixLaunch* launch) {
  return megafsdp::words_of(megafsdp::launch_matrix(*launch));
}

const char* megafsdp_cuda_transpose_codes(const megafsdp::CudaTransposeLaunch* launch) {
  return megafsdp::words_of(megafsdp::launch_transpose(*launch));
}
}
