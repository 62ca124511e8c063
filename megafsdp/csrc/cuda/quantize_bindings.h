// Python bindings of the kernels of quantized weights and inputs.
#pragma once

#include <pybind11/pybind11.h>

namespace megafsdp {

// Adds the functions to the module.
void bind_quantize(pybind11::module_& module);

}  // namespace megafsdp
