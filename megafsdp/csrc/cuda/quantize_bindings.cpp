#include "quantize_bindings.h"

#include <pybind11/stl.h>

#include "launch_errors.h"
#include "quantize.h"
#include "quantize_arguments.h"

namespace py = pybind11;

namespace megafsdp {
namespace {

// Element, family of scales, rows and columns of a tile.
using Coding = std::tuple<std::string, std::string, int64_t, int64_t>;

TileCodingArguments coding_of(Coding coding) {
  auto& [element, scaling, tile_rows, tile_cols] = coding;
  return {std::move(element), std::move(scaling), tile_rows, tile_cols};
}

CudaTarget target_of(int device, uintptr_t stream) {
  check_device(device);
  return {device, reinterpret_cast<void*>(stream)};
}

CudaTileLaunch launch_of(const TileArguments& arguments, const std::vector<TileFragment>& fragments,
                         uint32_t* largest, const CudaTarget& target) {
  return {fragments.data(),
          static_cast<int64_t>(fragments.size()),
          element_of(arguments.coding.element),
          scaling_of(arguments.coding.scaling),
          dtype_of(arguments.dtype),
          dtype_of(arguments.through),
          reinterpret_cast<const float*>(std::get<0>(arguments.noise)),
          largest,
          target};
}

void add_tile_maxima(Coding coding, std::vector<FragmentArguments> fragments, std::string dtype,
                     std::string through, int device, uintptr_t stream) {
  const TileArguments arguments{
      coding_of(std::move(coding)), std::move(fragments), std::move(dtype), std::move(through), {}};
  const std::vector<TileFragment> checked = checked_fragments(arguments, false);
  const CudaTileLaunch launch = launch_of(arguments, checked, nullptr, target_of(device, stream));
  py::gil_scoped_release unlocked;
  raise_unless_null("add_tile_maxima", megafsdp_cuda_tile_maxima(&launch));
}

void encode_tiles(Coding coding, std::vector<FragmentArguments> fragments, std::string dtype,
                  std::string through, BufferArguments noise, BufferArguments largest, int device,
                  uintptr_t stream) {
  const TileArguments arguments{coding_of(std::move(coding)), std::move(fragments),
                                std::move(dtype), std::move(through), noise};
  const std::vector<TileFragment> checked = checked_fragments(arguments, true);
  uint32_t* const room = checked_largest(arguments.coding, largest, num_matrices_of(arguments));
  const CudaTileLaunch launch = launch_of(arguments, checked, room, target_of(device, stream));
  py::gil_scoped_release unlocked;
  raise_unless_null("encode_tiles", megafsdp_cuda_encode_tiles(&launch));
}

void fill_scale_tables(Coding coding, std::vector<TableArguments> tables, BufferArguments largest,
                       int device, uintptr_t stream) {
  const TileCodingArguments arguments = coding_of(std::move(coding));
  const std::vector<ScaleTable> checked = checked_tables(arguments, tables);
  const CudaTableLaunch launch{checked.data(),
                               static_cast<int64_t>(checked.size()),
                               element_of(arguments.element),
                               scaling_of(arguments.scaling),
                               checked_largest(arguments, largest, num_matrices_of(tables)),
                               target_of(device, stream)};
  py::gil_scoped_release unlocked;
  raise_unless_null("fill_scale_tables", megafsdp_cuda_fill_tables(&launch));
}

void decode_tiles(Coding coding, StackShape shape, BufferArguments codes, BufferArguments table,
                  BufferArguments out, std::string out_dtype, int device, uintptr_t stream) {
  const DecodeArguments arguments{coding_of(std::move(coding)), shape, codes, table, out,
                                  std::move(out_dtype)};
  const CudaDecodeLaunch launch{checked_decode(arguments),
                                reinterpret_cast<const uint8_t*>(std::get<0>(codes)),
                                reinterpret_cast<void*>(std::get<0>(out)),
                                element_of(arguments.coding.element),
                                scaling_of(arguments.coding.scaling),
                                dtype_of(arguments.out_dtype),
                                target_of(device, stream)};
  py::gil_scoped_release unlocked;
  raise_unless_null("decode_tiles", megafsdp_cuda_decode_tiles(&launch));
}

void encode_matrix(Coding coding, StackShape shape, BufferArguments values, std::string dtype,
                   BufferArguments codes, BufferArguments transposed, BufferArguments maximum,
                   BufferArguments table, int device, uintptr_t stream) {
  const MatrixArguments arguments{coding_of(std::move(coding)),
                                  shape,
                                  values,
                                  std::move(dtype),
                                  codes,
                                  transposed,
                                  maximum,
                                  table};
  const CudaMatrixLaunch launch = checked_matrix(arguments, target_of(device, stream));
  py::gil_scoped_release unlocked;
  raise_unless_null("encode_matrix", megafsdp_cuda_encode_matrix(&launch));
}

void transpose_codes(std::string element, StackShape shape, BufferArguments codes,
                     BufferArguments transposed, int device, uintptr_t stream) {
  const CudaTransposeLaunch launch =
      checked_transpose({std::move(element), shape, codes, transposed}, target_of(device, stream));
  py::gil_scoped_release unlocked;
  raise_unless_null("transpose_codes", megafsdp_cuda_transpose_codes(&launch));
}

}  // namespace

void bind_quantize(py::module_& module) {
  module.def("add_tile_maxima", &add_tile_maxima, py::kw_only(), py::arg("coding"),
             py::arg("fragments"), py::arg("dtype"), py::arg("through"), py::arg("device"),
             py::arg("stream"),
             "Raise the maxima of tiles to those of a batch of fragments; releases the GIL.");
  module.def(
      "encode_tiles", &encode_tiles, py::kw_only(), py::arg("coding"), py::arg("fragments"),
      py::arg("dtype"), py::arg("through"), py::arg("noise"), py::arg("largest"), py::arg("device"),
      py::arg("stream"),
      "Write the codes of a batch of fragments; releases the GIL. With two levels largest is "
      "room for a number for each of their matrices, zero.");
  module.def("fill_scale_tables", &fill_scale_tables, py::kw_only(), py::arg("coding"),
             py::arg("tables"), py::arg("largest"), py::arg("device"), py::arg("stream"),
             "Write a batch of tables of scales from maxima; releases the GIL. largest is as of "
             "encode_tiles.");
  module.def("decode_tiles", &decode_tiles, py::kw_only(), py::arg("coding"), py::arg("shape"),
             py::arg("codes"), py::arg("table"), py::arg("out"), py::arg("out_dtype"),
             py::arg("device"), py::arg("stream"),
             "Write the values of a tensor's codes; releases the GIL.");
  module.def(
      "is_one_pass", [](Coding coding) { return is_one_pass(coding_of(std::move(coding))); },
      py::arg("coding"), "Return whether encode_matrix finds the scales by itself.");
  module.def(
      "encode_matrix", &encode_matrix, py::kw_only(), py::arg("coding"), py::arg("shape"),
      py::arg("values"), py::arg("dtype"), py::arg("codes"), py::arg("transposed"),
      py::arg("maximum"), py::arg("table"), py::arg("device"), py::arg("stream"),
      "Write a matrix's codes, transposed too or only, and the scales of its blocks unless a "
      "maximum is given; releases the GIL.");
  module.def("transpose_codes", &transpose_codes, py::kw_only(), py::arg("element"),
             py::arg("shape"), py::arg("codes"), py::arg("transposed"), py::arg("device"),
             py::arg("stream"), "Write the codes of matrices transposed; releases the GIL.");
}

}  // namespace megafsdp
