// Adam and the sum of squares on a CPU, with the arguments of adam_arguments.h.
#pragma once

#include "../kernels/simd.h"
#include "adam_arguments.h"

namespace megafsdp {

// Run checked arguments on a number of threads; touch no Python object.
void run_adam(const AdamArguments& arguments, int64_t num_threads, Simd level);
double run_square_sum(const SquareSumArguments& arguments, int64_t num_threads, Simd level);

}  // namespace megafsdp
