// One element of Adam or AdamW, for any processor.
//
//   if l2 != 0: g = fma(l2, p, g)
//   p *= decay
//   m  = fma(g - m, lerp, lerp > 0 ? m : g)
//   v  = fma(square * g, g, beta2 * v)
//   p -= (step_size * m) / (sqrt(v) / root + eps)
//
// Each operation rounds to nearest even once; a Math class says how a processor does that. The
// constants and their meaning are those of AdamConstants in optimizer/hyper.py. Compilers for the
// host and for CUDA take this file alike.
#pragma once

#include "inline.h"

namespace megafsdp {

struct AdamConstants {
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
MEGAFSDP_INLINE void adam_update(const AdamConstants& c, float g, float& p, float& m, float& v) {
  if (c.l2 != 0.0f) g = Math::fma(c.l2, p, g);
  p = Math::mul(p, c.decay);
  m = Math::fma(Math::sub(g, m), c.lerp, c.lerp > 0.0f ? m : g);
  v = Math::fma(Math::mul(c.square, g), g, Math::mul(c.beta2, v));
  const float denominator = Math::add(Math::div(Math::sqrt(v), c.root), c.eps);
  p = Math::sub(p, Math::div(Math::mul(c.step_size, m), denominator));
}

}  // namespace megafsdp
