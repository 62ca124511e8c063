// Flush subnormal numbers to zero, operation by operation, for processors that have no mode for it
// or leave open how a result at the border is treated.
//
//   x86 in its mode (and so kernels/adam.h): a result is zero if it is below 2**-126 after rounding
//   to 24 bits as if exponents had no end. All of [2**-126 - 2**-150, 2**-126) rounds to 2**-126
//   where subnormal numbers are kept; x86 gives zero for what lies below 2**-126 - 2**-151.
//
// Numbers from memory pass through take() once; all results are flushed already. A Math class below
// Flushing or Keeping computes with subnormal numbers, and its take() flushes one number.
//
// A branch at each result would cost a GPU more than the arithmetic. So each class names a Deferred
// class without branches, which keeps results at the border as they are and remembers that it met
// one. Its user checks is_in_doubt() once, at the end, and then drops the results.
#pragma once

#include "adam_formula.h"
#include "float16.h"

namespace megafsdp {

constexpr float kSmallestNormal = 0x1p-126f;
constexpr double kFlushedBelow = 0x1p-126 - 0x1p-151;

MEGAFSDP_INLINE float flushed(float value) {
  const uint32_t bits = bits_of(value);
  return float_of((bits & 0x7f800000) == 0 ? bits & 0x80000000 : bits);
}

MEGAFSDP_INLINE AdamConstants flushed(const AdamConstants& c) {
  return {flushed(c.decay),  flushed(c.l2),   flushed(c.lerp), flushed(c.beta2),
          flushed(c.square), flushed(c.root), flushed(c.eps),  flushed(c.step_size)};
}

template <typename Math>
struct Keeping : Math {
  using Deferred = Keeping;
  MEGAFSDP_INLINE static float take(float a) { return a; }
  MEGAFSDP_INLINE static bool is_in_doubt() { return false; }
};

// Only three operations can round up to the border. Subnormal sums are exact; roots, and their
// quotients by the root of a bias correction, which is at most one, are never small.
MEGAFSDP_INLINE bool is_at_border(float rounded) {
  return __builtin_fabsf(rounded) == kSmallestNormal;
}

template <typename Math>
class DeferredFlushing;

template <typename Math>
struct Flushing {
  using Deferred = DeferredFlushing<Math>;
  MEGAFSDP_INLINE static float take(float a) { return Math::take(a); }
  MEGAFSDP_INLINE static float add(float a, float b) { return Math::take(Math::add(a, b)); }
  MEGAFSDP_INLINE static float sub(float a, float b) { return Math::take(Math::sub(a, b)); }
  MEGAFSDP_INLINE static float root_over(float a, float b) { return Math::root_over(a, b); }

  MEGAFSDP_INLINE static float mul(float a, float b) {
    const float rounded = Math::mul(a, b);
    if (is_at_border(rounded)) return settle(rounded, static_cast<double>(a) * b, 0.0);
    return Math::take(rounded);
  }

  // A quotient differs from the threshold by 2**-49 of it or more, so double tells on which side.
  MEGAFSDP_INLINE static float div(float a, float b) {
    const float rounded = Math::div(a, b);
    if (is_at_border(rounded)) return settle(rounded, static_cast<double>(a) / b, 0.0);
    return Math::take(rounded);
  }

  MEGAFSDP_INLINE static float fma(float a, float b, float c) {
    const float rounded = Math::fma(a, b, c);
    if (is_at_border(rounded)) return settle(rounded, static_cast<double>(a) * b, c);
    return Math::take(rounded);
  }

 private:
  // Returns zero if the exact sum counts as subnormal, else rounded, which is its rounding.
  MEGAFSDP_INLINE static float settle(float rounded, double product, double addend) {
    const double sign = rounded < 0.0f ? -1.0 : 1.0;
    const double total = product + addend;
    const double back = total - product;
    const double error = sign * ((product - (total - back)) + (addend - back));
    const double distance = sign * total - kFlushedBelow;
    const bool is_subnormal = distance < 0.0 || (distance == 0.0 && error < 0.0);
    return is_subnormal ? (rounded < 0.0f ? -0.0f : 0.0f) : rounded;
  }
};

// Computes like Flushing, but only notes results at the border.
template <typename Math>
class DeferredFlushing : public Flushing<Math> {
 public:
  MEGAFSDP_INLINE float mul(float a, float b) { return noted(Math::mul(a, b)); }
  MEGAFSDP_INLINE float div(float a, float b) { return noted(Math::div(a, b)); }
  MEGAFSDP_INLINE float fma(float a, float b, float c) { return noted(Math::fma(a, b, c)); }

  MEGAFSDP_INLINE bool is_in_doubt() const { return met_border_; }

 private:
  MEGAFSDP_INLINE float noted(float rounded) {
    met_border_ |= is_at_border(rounded);
    return Math::take(rounded);
  }

  bool met_border_ = false;
};

}  // namespace megafsdp
