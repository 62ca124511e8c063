// Make what threads read from launches: tables of fragments, and tasks; on the host.
//
// The functions here call visit(...) with one value for each type that a kernel is compiled for. A
// test plans with them too, and runs the threads in turn.
#pragma once

#include <cstdint>

#include "block_thread.h"
#include "encode_transposed_thread.h"
#include "quantize.h"
#include "table_thread.h"
#include "tile_thread.h"

namespace megafsdp {

template <typename Visit>
void visit_element(ElementKind element, const Visit& visit) {
  if (element == ElementKind::kE4M3) return visit(E4M3{});
  if (element == ElementKind::kE5M2) return visit(E5M2{});
  visit(E2M1{});
}

// Visits the 8-bit elements only.
template <typename Visit>
void visit_float8(ElementKind element, const Visit& visit) {
  if (element == ElementKind::kE4M3) return visit(E4M3{});
  visit(E5M2{});
}

// Visits the stored type: uint16_t stands for bf16 and fp16.
template <typename Visit>
void visit_stored(Dtype dtype, const Visit& visit) {
  if (dtype == Dtype::kFloat32) return visit(float{});
  visit(uint16_t{});
}

inline bool are_values_aligned(const void* values, Dtype dtype) {
  return dtype == Dtype::kFloat32 ? may_be_at<Neighbours<float>>(values)
                                  : may_be_at<Neighbours<uint16_t>>(values);
}

inline bool are_codes_aligned(const void* codes, ElementKind element) {
  return element == ElementKind::kE2M1 ? may_be_at<CodeVector<E2M1>>(codes)
                                       : may_be_at<CodeVector<E4M3>>(codes);
}

inline FragmentRow row_of_values(const TileFragment& fragment, const Reading& reading) {
  FragmentRow row = laid_out(fragment.grid, fragment.first_row, fragment.num_rows);
  row.from = fragment.values;
  row.tiles = fragment.maxima;
  row.is_aligned =
      row.cols % kNeighbours == 0 && are_values_aligned(fragment.values, reading.dtype);
  return row;
}

inline FragmentRow row_of_codes(const TileFragment& fragment, const CudaTileLaunch& launch,
                                const uint32_t* largest) {
  FragmentRow row = row_of_values(fragment, {launch.dtype, launch.through});
  row.to = fragment.codes;
  row.of_matrices = largest;
  row.noise = launch.noise;
  row.is_aligned &= are_codes_aligned(fragment.codes, launch.element) &&
                    may_be_at<Neighbours<float>>(launch.noise);
  return row;
}

inline FragmentRow row_of_decoded(const CudaDecodeLaunch& launch) {
  const TileGrid& grid = launch.table.grid;
  FragmentRow row = laid_out(grid, 0, grid.num_matrices * grid.rows);
  row.from = launch.codes;
  row.to = launch.out;
  row.tiles = launch.table.entries;
  row.of_matrices = launch.table.of_matrices;
  row.is_aligned = row.cols % kNeighbours == 0 && are_codes_aligned(launch.codes, launch.element) &&
                   are_values_aligned(launch.out, launch.dtype);
  return row;
}

// Calls launch(table) for tables of rows that make_row(i) returns, until it returns an error, which
// is then returned; no error is zero.
template <typename Table, int kMostRows, typename MakeRow, typename Launch>
auto for_each_table(int64_t num_rows, const MakeRow& make_row, const Launch& launch) {
  decltype(launch(Table{})) error{};
  for (int64_t i = 0; i < num_rows;) {
    Table table;
    for (; i < num_rows && table.count < kMostRows; ++i) add_row(make_row(i), table);
    error = launch(table);
    if (error) break;
  }
  return error;
}

inline bool are_parts_of_rows(const CudaMatrixLaunch& launch) {
  return launch.maximum == nullptr && launch.grid.tile_rows == 1;
}

inline BlockTask block_task_of(const CudaMatrixLaunch& launch) {
  BlockTask task = laid_out_in_blocks(launch.grid, launch.values, launch.codes, launch.entries);
  task.dtype = launch.dtype;
  task.scaling = launch.scaling;
  task.is_aligned = task.cols % kNeighbours == 0 &&
                    are_values_aligned(launch.values, launch.dtype) &&
                    are_codes_aligned(launch.codes, launch.element);
  return task;
}

inline EncodeTransposedTask transposed_task_of(const CudaMatrixLaunch& launch) {
  const TileGrid& grid = launch.grid;
  EncodeTransposedTask task{};
  task.grid = transpose_grid(1, grid.rows, grid.cols, kEncodedCols);
  task.values = launch.values;
  task.codes = launch.codes;
  task.transposed = launch.transposed;
  task.maximum = launch.maximum;
  task.entries = launch.entries;
  const int64_t block_rows = launch.maximum == nullptr ? grid.tile_rows : kTransposeRows;
  while ((INT64_C(1) << task.block_rows_log2) < block_rows) ++task.block_rows_log2;
  task.dtype = launch.dtype;
  task.scaling = launch.scaling;
  task.is_aligned = grid.cols % kNeighbours == 0 &&
                    are_values_aligned(launch.values, launch.dtype) &&
                    are_codes_aligned(launch.codes, launch.element);
  task.stores_vectors = grid.rows % kCodesOfStore == 0 &&
                        may_be_at<Vector<uint8_t, kCodesOfStore>>(launch.transposed);
  return task;
}

inline TransposeTask transpose_task_of(const CudaTransposeLaunch& launch) {
  const auto may_be_vector = [&](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % (kTransposeWidth / launch.codes_per_byte) == 0;
  };
  TransposeTask task{};
  task.grid = transpose_grid(launch.num_matrices, launch.rows, launch.cols, TransposeShared::kCols);
  task.codes = launch.codes;
  task.out = launch.out;
  task.loads_vectors = launch.cols % kTransposeWidth == 0 && may_be_vector(launch.codes);
  task.stores_vectors = launch.rows % kCodesOfStore == 0 && may_be_vector(launch.out);
  return task;
}

}  // namespace megafsdp
