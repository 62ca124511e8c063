// Launches of the kernels of quantized weights and inputs; without CUDA headers, so that any host
// compiler can call them.
//
// Each function returns null, or what CUDA says went wrong, in words that live as long as the
// program. A launch returns before its kernels have run; streams are handles of the CUDA runtime.
#pragma once

#include <cstdint>

#include "../kernels/adam_buffers.h"
#include "../kernels/scales.h"
#include "../kernels/tile_buffers.h"

namespace megafsdp {

// Where a launch goes.
struct CudaTarget {
  int device;
  void* stream;
};

// Maxima or codes of fragments, a launch for each table of tile_table.h, nearly always one. noise
// is for a single fragment, and may be null. largest is for codes with two levels: room for one
// number for each matrix of each fragment, zero at first.
struct CudaTileLaunch {
  const TileFragment* fragments;
  int64_t num_fragments;
  ElementKind element;
  ScalingKind scaling;
  Dtype dtype;
  Dtype through;
  const float* noise;
  uint32_t* largest;
  CudaTarget target;
};

// Tables; largest as in CudaTileLaunch.
struct CudaTableLaunch {
  const ScaleTable* tables;
  int64_t num_tables;
  ElementKind element;
  ScalingKind scaling;
  uint32_t* largest;
  CudaTarget target;
};

struct CudaDecodeLaunch {
  ScaleTable table;
  const uint8_t* codes;
  void* out;
  ElementKind element;
  ScalingKind scaling;
  Dtype dtype;
  CudaTarget target;
};

// A matrix in 8-bit codes and one level, in one pass. Its tiles are parts of rows or of columns,
// whose scales are written to entries; or maximum is given, for all of the matrix. codes or
// transposed, which has the columns as rows, may be null. Tiles along rows are not transposed.
struct CudaMatrixLaunch {
  TileGrid grid;
  const void* values;
  uint8_t* codes;
  uint8_t* transposed;
  const int32_t* maximum;
  void* entries;
  ElementKind element;
  ScalingKind scaling;
  Dtype dtype;
  CudaTarget target;
};

// Codes of a stack of matrices, each of which is transposed.
struct CudaTransposeLaunch {
  int64_t num_matrices;
  int64_t rows;
  int64_t cols;
  const uint8_t* codes;
  uint8_t* out;
  int codes_per_byte;
  CudaTarget target;
};

}  // namespace megafsdp

extern "C" {

const char* megafsdp_cuda_tile_maxima(const megafsdp::CudaTileLaunch* launch);

const char* megafsdp_cuda_encode_tiles(const megafsdp::CudaTileLaunch* launch);

const char* megafsdp_cuda_fill_tables(const megafsdp::CudaTableLaunch* launch);

const char* megafsdp_cuda_decode_tiles(const megafsdp::CudaDecodeLaunch* launch);

const char* megafsdp_cuda_encode_matrix(const megafsdp::CudaMatrixLaunch* launch);

const char* megafsdp_cuda_transpose_codes(const megafsdp::CudaTransposeLaunch* launch);
}
