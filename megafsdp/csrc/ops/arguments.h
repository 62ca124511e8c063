// Checks of arguments that come from Python; each throws std::invalid_argument naming the argument.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace megafsdp {

inline void check(bool is_right, const std::string& message) {
  if (!is_right) throw std::invalid_argument(message);
}

inline void check_address(const std::string& argument, uintptr_t address, uintptr_t itemsize) {
  check(address != 0, argument + ": expected an address, got null");
  check(address % itemsize == 0, argument + ": expected an address aligned to its element size");
}

inline void check_positive(const std::string& argument, int64_t value) {
  check(value > 0, argument + ": expected a positive number, got " + std::to_string(value));
}

}  // namespace megafsdp
