// Python bindings of megafsdp._cuda, compiled by the host compiler; CUDA is behind adam.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "../kernels/flushing.h"
#include "../kernels/square_sum_order.h"
#include "../ops/adam_arguments.h"
#include "adam.h"
#include "launch_errors.h"
#include "quantize_bindings.h"

namespace py = pybind11;

namespace {

using megafsdp::check;
using megafsdp::check_address;
using megafsdp::check_device;
using megafsdp::raise_unless_null;

// A parameter whose count of steps is on the device: addresses of it and of its rate, or null; the
// rate, both betas and the decay; AdamW, bias correction.
using LateParameter = std::tuple<uintptr_t, uintptr_t, std::array<double, 4>, std::array<bool, 2>>;

megafsdp::LateHyper late_hyper_of(const LateParameter& parameter,
                                  const megafsdp::AdamConstants& fixed) {
  const auto& [step, lr, numbers, flags] = parameter;
  check_address("late step", step, 4);
  if (lr != 0) check_address("late lr", lr, 8);
  return {fixed,
          numbers[0],
          numbers[1],
          numbers[2],
          numbers[3],
          reinterpret_cast<float*>(step),
          reinterpret_cast<const double*>(lr),
          flags[0],
          flags[1]};
}

void adam_step(uintptr_t weight, uintptr_t remainder, uintptr_t grad, uintptr_t exp_avg,
               uintptr_t exp_avg_sq, uintptr_t copy_out, int64_t numel, std::string grad_dtype,
               std::string state_dtype, std::string copy_out_dtype,
               std::vector<std::tuple<int64_t, int64_t, std::array<double, 8>>> segments,
               double grad_scale, bool flush_denormals, uintptr_t device_grad_scale,
               uintptr_t found_inf, std::vector<LateParameter> late, uintptr_t late_constants,
               int device, uintptr_t stream) {
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
                                          flush_denormals};
  megafsdp::check_adam(arguments);
  if (device_grad_scale != 0) check_address("device_grad_scale", device_grad_scale, 4);
  if (found_inf != 0) check_address("found_inf", found_inf, 4);
  check(late.empty() || late.size() == arguments.segments.size(),
        "late: expected none or one for each segment, got " + std::to_string(late.size()));
  if (!late.empty()) check_address("late_constants", late_constants, 16);
  check_device(device);
  const megafsdp::AdamBuffers buffers = megafsdp::buffers_of(arguments);
  std::vector<megafsdp::AdamSegment> rows = megafsdp::segments_of(arguments);
  std::vector<megafsdp::LateHyper> hypers;
  for (size_t i = 0; i < late.size(); ++i) {
    hypers.push_back(late_hyper_of(late[i], rows[i].constants));
  }
  if (flush_denormals) {
    for (megafsdp::AdamSegment& row : rows) row.constants = megafsdp::flushed(row.constants);
  }
  py::gil_scoped_release unlocked;
  const megafsdp::CudaAdamLaunch launch{
      rows.data(),
      static_cast<int64_t>(rows.size()),
      hypers.empty() ? nullptr : hypers.data(),
      hypers.empty() ? nullptr : reinterpret_cast<megafsdp::AdamConstants*>(late_constants),
      reinterpret_cast<const float*>(device_grad_scale),
      reinterpret_cast<const float*>(found_inf),
      flush_denormals,
      device,
      reinterpret_cast<void*>(stream)};
  raise_unless_null("adam_step", megafsdp_cuda_adam(&buffers, &launch));
}

void sums_of_squares(std::vector<std::tuple<uintptr_t, int64_t, std::string>> buffers,
                     uintptr_t sums, uintptr_t scratch, int device, uintptr_t stream) {
  std::vector<megafsdp::SquareSumValues> rows;
  for (auto& [values, numel, dtype] : buffers) {
    const megafsdp::SquareSumArguments arguments{values, numel, std::move(dtype)};
    megafsdp::check_square_sum(arguments);
    rows.push_back(
        {reinterpret_cast<const void*>(values), numel, megafsdp::dtype_of(arguments.dtype)});
  }
  check(!rows.empty(), "buffers: expected one or more");
  check_address("sums", sums, 8);
  check_address("scratch", scratch, 8);
  check_device(device);
  const megafsdp::CudaSquareSumLaunch launch{rows.data(),
                                             static_cast<int64_t>(rows.size()),
                                             reinterpret_cast<double*>(sums),
                                             reinterpret_cast<double*>(scratch),
                                             device,
                                             reinterpret_cast<void*>(stream)};
  py::gil_scoped_release unlocked;
  raise_unless_null("sums_of_squares", megafsdp_cuda_square_sums(&launch));
}

std::string why_not_on(int device) {
  check_device(device);
  py::gil_scoped_release unlocked;
  const char* words = megafsdp_cuda_check_device(device);
  return words == nullptr ? "" : words;
}

std::tuple<int, std::string> device_count() {
  py::gil_scoped_release unlocked;
  int count = 0;
  const char* words = megafsdp_cuda_device_count(&count);
  return {words == nullptr ? count : 0, words == nullptr ? "" : words};
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
  module.doc() =
      "CUDA kernels of megafsdp on raw addresses; their callers keep the memory alive. Functions "
      "that launch return before the kernels have run.";
  module.attr("ARCHS") = MEGAFSDP_CUDA_ARCHS;
  module.def("device_count", &device_count,
             "Return how many devices there are and, if that cannot be told, why. Starts CUDA.");
  module.def("why_not_on", &why_not_on, py::arg("device"),
             "Return why the kernels cannot run on a device; empty if they can. Starts CUDA.");
  module.def("scratch_numel", &megafsdp::square_sum_scratch_numel, py::arg("numel"),
             "Return the doubles of device memory that sums_of_squares needs for a buffer.");
  module.def("adam_step", &adam_step, py::kw_only(), py::arg("weight"), py::arg("remainder"),
             py::arg("grad"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("copy_out"),
             py::arg("numel"), py::arg("grad_dtype"), py::arg("state_dtype"),
             py::arg("copy_out_dtype"), py::arg("segments"), py::arg("grad_scale"),
             py::arg("flush_denormals"), py::arg("device_grad_scale"), py::arg("found_inf"),
             py::arg("late"), py::arg("late_constants"), py::arg("device"), py::arg("stream"),
             "Update weights and moments in place, nearly always in one launch; releases the GIL. "
             "late has, for each segment or not at all, the address of the count of steps, of a "
             "rate in double or 0, rate, betas and decay, and whether it is AdamW and corrects for "
             "the bias; then late_constants has room for eight floats a segment.");
  module.def("sums_of_squares", &sums_of_squares, py::kw_only(), py::arg("buffers"),
             py::arg("sums"), py::arg("scratch"), py::arg("device"), py::arg("stream"),
             "Write the sum of squares of each buffer, which is an address, a length and a dtype, "
             "to doubles on the device; releases the GIL.");
  megafsdp::bind_quantize(module);
}
