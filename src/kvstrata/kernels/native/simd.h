// Vectors of fp32 lanes, one definition per instruction set, in a namespace of the set's name.
//
// Names of all three: Vec, LANES; set, load, store, fma, maximum, select_below, round, power_of_two, reduce_max,
// reduce_add, reduce<N>. `load_half<T>` reads half 0 or 1 of a block of 2 * LANES numbers of the cache in the order
// that costs least (bf16: even and odd ones); `natural<T>` undoes that order.
//
// Everything is inline and in the set's own namespace: a function that two sets shared would be linked once, with
// whichever set's instructions came first.
#pragma once

#include <cstdint>
#include <cstring>

#include "format.h"

#define KVSTRATA_INLINE inline __attribute__((always_inline))

#if defined(KVSTRATA_ISA_AVX512)
#include "simd_avx512.h"
#elif defined(KVSTRATA_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace kvstrata::KVSTRATA_ISA {

constexpr float LOWEST = -3.4028234e38f;
constexpr int BLOCK = 2 * LANES;

KVSTRATA_INLINE float least(float a, float b) { return a < b ? a : b; }
KVSTRATA_INLINE float most(float a, float b) { return a > b ? a : b; }

// 2^x within 2e-7 of it, relatively; 1 at 0, exactly 0 below 2^-126.5. x <= 127.
KVSTRATA_INLINE Vec exp2(Vec x) {
  x = maximum(set(-127.0f), x);  // in this order NaN stays NaN
  const Vec whole = round(x);
  const Vec r = x - whole;
  Vec y = set(1.32647271e-3f);  // of least relative error on [-1/2, 1/2], 9e-8, among those that give 1 at 0
  y = fma(y, r, set(9.67151265e-3f));
  y = fma(y, r, set(5.55073374e-2f));
  y = fma(y, r, set(2.40222421e-1f));
  y = fma(y, r, set(6.93146978e-1f));
  y = fma(y, r, set(1.0f));
  return y * power_of_two(whole);
}

KVSTRATA_INLINE float exp2(float x) {
  alignas(64) float lanes[LANES];
  store(lanes, exp2(set(x)));
  return lanes[0];
}

}  // namespace kvstrata::KVSTRATA_ISA
