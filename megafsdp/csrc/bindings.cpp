// Python bindings of megafsdp._csrc; nothing else includes pybind11.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernels/simd.h"
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

}  // namespace

PYBIND11_MODULE(_csrc, module) {
  module.doc() =
      "Native kernels of megafsdp on raw addresses; their callers keep the memory alive.";
  module.def("simd_levels", &megafsdp::simd_levels,
             "Return the instruction set levels that this processor has, weakest first.");
  module.def("sum_shards", &sum_shards, py::kw_only(), py::arg("shards"), py::arg("out"),
             py::arg("numel"), py::arg("shard_dtype"), py::arg("out_dtype"), py::arg("scale"),
             py::arg("accumulate"),
             "Write scale * (sum of shards), plus out if accumulate, to out; lets go of the GIL.");
}
