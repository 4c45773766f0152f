// From the scores of some pages to probabilities, relative to the largest score so far.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

// softcap * tanh(x), as 1 - 2 / (e^2x + 1)
inline void soften(float softcap, float* s) {
  const Vec twice = set(2.8853901f);  // 2 log2(e)
  for (int t = 0; t < PAGE; t += LANES) {
    const Vec x = maximum(set(-40.0f), load(s + t) * twice);
    const Vec e = exp2(x < set(60.0f) ? x : set(60.0f));
    store(s + t, set(softcap) * (set(1.0f) - set(2.0f) / (e + set(1.0f))));
  }
}

// Scores a row may not see become -inf: those from `n` on, and those at positions up to `after`.
inline void hide(float* s, int n, const int32_t* positions, int32_t after) {
  if (positions) {
    for (int t = 0; t < n; ++t) s[t] = positions[t] > after ? s[t] : -__builtin_inff();
  }
  for (int t = n < 0 ? 0 : n; t < PAGE; ++t) s[t] = -__builtin_inff();
}

// One row's scores of `count` pages become p relative to max; what was summed relative to an older max is brought to the
// new one.
inline void soft_maximum(float* const* pages, int count, float& max, float& sum, float* acc, int64_t acc_dim) {
  Vec top = load(pages[0]);
  for (int i = 0; i < count; ++i) {
    for (int t = 0; t < PAGE; t += LANES) top = maximum(top, load(pages[i] + t));
  }
  const float largest = reduce_max(top);
  if (largest > max) {
    const float factor = max == -__builtin_inff() ? 0.0f : exp2(max - largest);
    for (int64_t d = 0; d < acc_dim; d += LANES) store(acc + d, load(acc + d) * set(factor));
    sum *= factor;
    max = largest;
  }
  if (max == -__builtin_inff()) {  // nothing seen yet: -inf - -inf would be NaN
    bool nothing = true;
    for (int i = 0; i < count; ++i) {
      for (int t = 0; t < PAGE; ++t) nothing = nothing && pages[i][t] == max;
    }
    if (nothing) {
      for (int i = 0; i < count; ++i) std::memset(pages[i], 0, PAGE * sizeof(float));
      return;
    }
  }
  Vec total = {};
  for (int i = 0; i < count; ++i) {
    for (int t = 0; t < PAGE; t += LANES) {
      const Vec p = exp2(load(pages[i] + t) - set(max));
      total = total + p;
      store(pages[i] + t, p);
    }
  }
  sum += reduce_add(total);
}

}  // namespace kvstrata::KVSTRATA_ISA
