// One element of Adam or AdamW, for any processor.
//
//   if l2 != 0: g = fma(l2, p, g)
//   p *= decay
//   m  = fma(g - m, lerp, lerp > 0 ? m : g)
//   v  = fma(square * g, g, beta2 * v)
//   p -= (step_size * m) / (sqrt(v) / root + eps)
//
// Each operation rounds to nearest even once; an object of a Math class says how a processor does
// that. The constants and their meaning are those of AdamConstants in optimizer/kernels/hyper.py.
// Compilers for the host and for CUDA take this file alike.
#pragma once

#include "inline.h"

namespace megafsdp {

struct alignas(16) AdamConstants {
  float decay;
  float l2;
  float lerp;
  float beta2;
  float square;
  float root;
  float eps;
  float step_size;
};

template <typename Math>
MEGAFSDP_INLINE void adam_update(Math& math, const AdamConstants& c, float g, float& p, float& m,
                                 float& v) {
  if (c.l2 != 0.0f) g = math.fma(c.l2, p, g);
  p = math.mul(p, c.decay);
  m = math.fma(math.sub(g, m), c.lerp, c.lerp > 0.0f ? m : g);
  v = math.fma(math.mul(c.square, g), g, math.mul(c.beta2, v));
  const float denominator = math.add(math.root_over(v, c.root), c.eps);
  p = math.sub(p, math.div(math.mul(c.step_size, m), denominator));
}

}  // namespace megafsdp
