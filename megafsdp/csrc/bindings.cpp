// Python bindings of megafsdp._csrc; nothing else includes pybind11.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels/simd.h"
#include "ops/adam.h"
#include "ops/arguments.h"
#include "ops/histories.h"
#include "ops/noise.h"
#include "ops/quantize.h"
#include "ops/shard_sum.h"

namespace py = pybind11;

namespace {

void sum_shards(std::vector<uintptr_t> shards, uintptr_t out, int64_t numel,
                std::string shard_dtype, std::string out_dtype, double scale, bool accumulate) {
  const megafsdp::ShardSumArguments arguments{
      std::move(shards),    out,   numel,     std::move(shard_dtype),
      std::move(out_dtype), scale, accumulate};
  megafsdp::check_shard_sum(arguments);
  // The environment is read while the lock is held: Python writes it under the same lock.
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_shard_sum(arguments, level);
}

void adam_step(uintptr_t weight, uintptr_t remainder, uintptr_t grad, uintptr_t exp_avg,
               uintptr_t exp_avg_sq, uintptr_t copy_out, int64_t numel, std::string grad_dtype,
               std::string state_dtype, std::string copy_out_dtype,
               std::vector<std::tuple<int64_t, int64_t, std::array<double, 8>>> segments,
               double grad_scale, bool flush_denormals, int64_t num_threads, uintptr_t new_weight,
               uintptr_t new_exp_avg, uintptr_t new_exp_avg_sq) {
  const megafsdp::AdamArguments arguments{weight,
                                          remainder,
                                          grad,
                                          exp_avg,
                                          exp_avg_sq,
                                          copy_out,
                                          numel,
                                          std::move(grad_dtype),
                                          std::move(state_dtype),
                                          std::move(copy_out_dtype),
                                          std::move(segments),
                                          grad_scale,
                                          flush_denormals,
                                          new_weight,
                                          new_exp_avg,
                                          new_exp_avg_sq};
  megafsdp::check_adam(arguments);
  megafsdp::check_positive("num_threads", num_threads);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_adam(arguments, num_threads, level);
}

double sum_of_squares(uintptr_t values, int64_t numel, std::string dtype, int64_t num_threads) {
  const megafsdp::SquareSumArguments arguments{values, numel, std::move(dtype)};
  megafsdp::check_square_sum(arguments);
  megafsdp::check_positive("num_threads", num_threads);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  return megafsdp::run_square_sum(arguments, num_threads, level);
}

// Element, family of scales, rows and columns of a tile.
using Coding = std::tuple<std::string, std::string, int64_t, int64_t>;

megafsdp::TileCodingArguments coding_of(Coding coding) {
  auto& [element, scaling, tile_rows, tile_cols] = coding;
  return {std::move(element), std::move(scaling), tile_rows, tile_cols};
}

void add_tile_maxima(Coding coding, std::vector<megafsdp::FragmentArguments> fragments,
                     std::string dtype, std::string through, int64_t num_threads) {
  const megafsdp::TileArguments arguments{coding_of(std::move(coding)), std::move(fragments),
                                          std::move(dtype), std::move(through), {0, 0}};
  megafsdp::check_positive("num_threads", num_threads);
  const auto checked = megafsdp::tile_fragments_of(arguments, false);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_tile_maxima(arguments, checked, num_threads, level);
}

void encode_tiles(Coding coding, std::vector<megafsdp::FragmentArguments> fragments,
                  std::string dtype, std::string through, megafsdp::BufferArguments noise,
                  int64_t num_threads) {
  const megafsdp::TileArguments arguments{coding_of(std::move(coding)), std::move(fragments),
                                          std::move(dtype), std::move(through), noise};
  megafsdp::check_positive("num_threads", num_threads);
  const auto checked = megafsdp::tile_fragments_of(arguments, true);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_encode(arguments, checked, num_threads, level);
}

void fill_scale_tables(Coding coding, std::vector<megafsdp::TableArguments> tables,
                       int64_t num_threads) {
  const megafsdp::TileCodingArguments checked_coding = coding_of(std::move(coding));
  megafsdp::check_positive("num_threads", num_threads);
  const auto checked = megafsdp::scale_tables_of(checked_coding, tables);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_scale_tables(checked_coding, checked, num_threads, level);
}

void decode_tiles(Coding coding, megafsdp::StackShape shape, megafsdp::BufferArguments codes,
                  megafsdp::BufferArguments table, megafsdp::BufferArguments out,
                  std::string out_dtype, int64_t num_threads) {
  const megafsdp::DecodeArguments arguments{coding_of(std::move(coding)), shape, codes, table, out,
                                            std::move(out_dtype)};
  megafsdp::check_positive("num_threads", num_threads);
  const megafsdp::ScaleTable checked = megafsdp::check_decode(arguments);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_decode(arguments, checked, num_threads, level);
}

void encode_blocks(Coding coding, megafsdp::StackShape shape, megafsdp::BufferArguments values,
                   std::string dtype, megafsdp::BufferArguments table,
                   megafsdp::BufferArguments codes, int64_t num_threads) {
  const megafsdp::BlockArguments arguments{coding_of(std::move(coding)), shape, values,
                                           std::move(dtype), table, codes};
  megafsdp::check_positive("num_threads", num_threads);
  const megafsdp::ScaleTable checked = megafsdp::check_blocks(arguments);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_blocks(arguments, checked, num_threads, level);
}

void fill_uniform(uintptr_t out, int64_t numel, uint64_t seed, int64_t stream,
                  int64_t num_threads) {
  const megafsdp::UniformArguments arguments{out, numel, seed, stream};
  megafsdp::check_uniform(arguments);
  megafsdp::check_positive("num_threads", num_threads);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_uniform(arguments, num_threads, level);
}

void transform_rows(uintptr_t values, std::string dtype, int64_t num_rows, int64_t num_cols,
                    uintptr_t out, int64_t num_threads) {
  const megafsdp::HadamardArguments arguments{values, std::move(dtype), num_rows, num_cols, out};
  megafsdp::check_hadamard(arguments);
  megafsdp::check_positive("num_threads", num_threads);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_hadamard(arguments, num_threads, level);
}

void roll_histories(std::vector<megafsdp::HistoriesArguments> weights,
                    std::vector<megafsdp::HistoriesArguments> operands, int64_t length) {
  const megafsdp::RollArguments arguments{std::move(weights), std::move(operands), length};
  megafsdp::check_roll(arguments);
  const megafsdp::Simd level = megafsdp::simd_level();
  py::gil_scoped_release unlocked;
  megafsdp::run_roll(arguments, level);
}

}  // namespace

PYBIND11_MODULE(_csrc, module) {
  module.doc() =
      "Native kernels of megafsdp on raw addresses; their callers keep the memory alive.";
  module.def("simd_levels", &megafsdp::simd_levels,
             "Return the instruction set levels that this processor has, weakest first.");
  module.def("sum_shards", &sum_shards, py::kw_only(), py::arg("shards"), py::arg("out"),
             py::arg("numel"), py::arg("shard_dtype"), py::arg("out_dtype"), py::arg("scale"),
             py::arg("accumulate"),
             "Write scale * (sum of shards), plus out if accumulate, to out; releases the GIL.");
  module.def("adam_step", &adam_step, py::kw_only(), py::arg("weight"), py::arg("remainder"),
             py::arg("grad"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("copy_out"),
             py::arg("numel"), py::arg("grad_dtype"), py::arg("state_dtype"),
             py::arg("copy_out_dtype"), py::arg("segments"), py::arg("grad_scale"),
             py::arg("flush_denormals"), py::arg("num_threads"), py::arg("new_weight") = 0,
             py::arg("new_exp_avg") = 0, py::arg("new_exp_avg_sq") = 0,
             "Update weights and moments, in place or into new ones, in one pass; releases the "
             "GIL.");
  module.def("sum_of_squares", &sum_of_squares, py::kw_only(), py::arg("values"), py::arg("numel"),
             py::arg("dtype"), py::arg("num_threads"),
             "Return the sum of squares in double, in a fixed order; releases the GIL.");
  module.def("add_tile_maxima", &add_tile_maxima, py::kw_only(), py::arg("coding"),
             py::arg("fragments"), py::arg("dtype"), py::arg("through"), py::arg("num_threads"),
             "Raise the maxima of tiles to those of a batch of fragments; releases the GIL.");
  module.def("encode_tiles", &encode_tiles, py::kw_only(), py::arg("coding"), py::arg("fragments"),
             py::arg("dtype"), py::arg("through"), py::arg("noise"), py::arg("num_threads"),
             "Write the codes of a batch of fragments; releases the GIL.");
  module.def("fill_scale_tables", &fill_scale_tables, py::kw_only(), py::arg("coding"),
             py::arg("tables"), py::arg("num_threads"),
             "Write a batch of tables of scales from maxima; releases the GIL.");
  module.def("decode_tiles", &decode_tiles, py::kw_only(), py::arg("coding"), py::arg("shape"),
             py::arg("codes"), py::arg("table"), py::arg("out"), py::arg("out_dtype"),
             py::arg("num_threads"), "Write the values of a tensor's codes; releases the GIL.");
  module.def("encode_blocks", &encode_blocks, py::kw_only(), py::arg("coding"), py::arg("shape"),
             py::arg("values"), py::arg("dtype"), py::arg("table"), py::arg("codes"),
             py::arg("num_threads"),
             "Write scales of blocks and codes of a tensor in one pass; releases the "
             "GIL.");
  module.def("fill_uniform", &fill_uniform, py::kw_only(), py::arg("out"), py::arg("numel"),
             py::arg("seed"), py::arg("stream"), py::arg("num_threads"),
             "Write uniform fp32 numbers in [0, 1) by Philox 4x32-10; releases the GIL.");
  module.def("transform_rows", &transform_rows, py::kw_only(), py::arg("values"), py::arg("dtype"),
             py::arg("num_rows"), py::arg("num_cols"), py::arg("out"), py::arg("num_threads"),
             "Write the Hadamard transform of blocks of 16 rows; releases the GIL.");
  module.def("roll_histories", &roll_histories, py::kw_only(), py::arg("weights"),
             py::arg("operands"), py::arg("length"),
             "Append maxima to histories, and write what scales are made of; releases the GIL.");
}
