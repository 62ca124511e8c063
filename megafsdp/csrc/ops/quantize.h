// Maxima, scales, codes and values of tiles on a CPU.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/simd.h"
#include "quantize_arguments.h"

namespace megafsdp {

// Each takes arguments that quantize_arguments.h has checked, and touches no Python object.

// Raises the maxima of tiles to those of the fragments.
void run_tile_maxima(const TileArguments& arguments, const std::vector<TileFragment>& fragments,
                     int64_t num_threads, Simd level);

// Writes tables, padding included.
void run_scale_tables(const TileCodingArguments& coding, const std::vector<ScaleTable>& tables,
                      int64_t num_threads, Simd level);

// Writes the codes of the fragments.
void run_encode(const TileArguments& arguments, const std::vector<TileFragment>& fragments,
                int64_t num_threads, Simd level);

// Writes the values of a whole tensor.
void run_decode(const DecodeArguments& arguments, const ScaleTable& table, int64_t num_threads,
                Simd level);

// Writes the table and the codes of a whole tensor in one pass.
void run_blocks(const BlockArguments& arguments, const ScaleTable& table, int64_t num_threads,
                Simd level);

}  // namespace megafsdp
