// Element types by the names that Python gives them.
#pragma once

#include <string>

#include "../kernels/float16.h"

namespace megafsdp {

// Calls visit with a value of the named type; returns false, without a call, if it has no such
// name.
template <typename Visit>
bool visit_dtype(const std::string& name, const Visit& visit) {
  if (name == "float32") return visit(float{}), true;
  if (name == "bfloat16") return visit(BFloat16{}), true;
  if (name == "float16") return visit(Float16{}), true;
  return false;
}

}  // namespace megafsdp
