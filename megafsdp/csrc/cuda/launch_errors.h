// The exceptions that bindings raise for a failed launch.
#pragma once

#include <stdexcept>
#include <string>

#include "../ops/arguments.h"

namespace megafsdp {

inline void raise_unless_null(const char* function, const char* words) {
  if (words == nullptr) return;
  throw std::runtime_error(std::string("Expected ") + function +
                           "() to launch its CUDA kernels, got: " + words + ".");
}

inline void check_device(int device) {
  check(device >= 0, "device: expected an index, got " + std::to_string(device));
}

}  // namespace megafsdp
