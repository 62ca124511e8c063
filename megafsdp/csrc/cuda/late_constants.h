// Constants of Adam that a launch computes itself, from a count of steps and maybe a learning rate
// that the host has not read. The operations are those of AdamConstants in
// optimizer/kernels/hyper.py, in double.
//
// The file compiles for the host too, where a test runs it.
#pragma once

#include <cmath>

#include "../kernels/adam_formula.h"
#include "../kernels/flushing.h"

namespace megafsdp {

// One parameter. fixed has the constants that depend on neither of them; step is fp32, lr fp64 or
// null for the rate given here.
struct LateHyper {
  AdamConstants fixed;
  double rate;
  double beta1;
  double beta2;
  double weight_decay;
  float* step;
  const double* lr;
  bool is_adam_w;
  bool has_bias_correction;
};

// Counts the step, unless it is skipped, and returns its constants.
MEGAFSDP_INLINE AdamConstants late_constants(const LateHyper& hyper, bool skips, bool flushes) {
  const float step = *hyper.step + (skips ? 0.0f : 1.0f);
  *hyper.step = step;
  double rate = hyper.lr == nullptr ? hyper.rate : *hyper.lr;
  AdamConstants constants = hyper.fixed;
  if (hyper.is_adam_w) constants.decay = static_cast<float>(1.0 - rate * hyper.weight_decay);
  if (hyper.has_bias_correction) {
    const double power = step;
    constants.root = static_cast<float>(sqrt(1.0 - pow(hyper.beta2, power)));
    rate /= 1.0 - pow(hyper.beta1, power);
  }
  constants.step_size = static_cast<float>(rate);
  return flushes ? flushed(constants) : constants;
}

}  // namespace megafsdp
