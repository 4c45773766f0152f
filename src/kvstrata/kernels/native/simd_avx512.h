// AVX-512 F, BW, DQ, VL, VNNI: sixteen lanes.
#pragma once

#include <immintrin.h>

namespace kvstrata::KVSTRATA_ISA {

using Vec = __m512;
constexpr int LANES = 16;

KVSTRATA_INLINE Vec set(float x) { return _mm512_set1_ps(x); }
KVSTRATA_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
KVSTRATA_INLINE void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
KVSTRATA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
KVSTRATA_INLINE Vec maximum(Vec a, Vec b) { return _mm512_max_ps(a, b); }
KVSTRATA_INLINE Vec round(Vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// 2^n of a whole n in [-127, 127]; 2^-127 gives 0.
KVSTRATA_INLINE Vec power_of_two(Vec n) {
  const __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

KVSTRATA_INLINE float reduce_max(Vec x) { return _mm512_reduce_max_ps(x); }
KVSTRATA_INLINE float reduce_add(Vec x) { return _mm512_reduce_add_ps(x); }

KVSTRATA_INLINE __m256 fold(Vec x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }

// Sums of the lanes of N vectors, side by side.
template <int N>
KVSTRATA_INLINE void reduce(const Vec* x, float* to) {
  if constexpr (N % 4 == 0) {
    for (int i = 0; i < N; i += 4) {
      const __m256 low = _mm256_hadd_ps(fold(x[i]), fold(x[i + 1]));
      const __m256 y = _mm256_hadd_ps(low, _mm256_hadd_ps(fold(x[i + 2]), fold(x[i + 3])));
      _mm_storeu_ps(to + i, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
    }
  } else {
    for (int i = 0; i < N; ++i) to[i] = reduce_add(x[i]);
  }
}

KVSTRATA_INLINE Vec bf16_half(__m512i x, int half) {
  return _mm512_castsi512_ps(half ? _mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000)))
                                  : _mm512_slli_epi32(x, 16));
}

template <DType T>
KVSTRATA_INLINE Vec load_half(const char* p, int half) {
  if constexpr (T == DType::f32) return load(reinterpret_cast<const float*>(p) + half * LANES);
  if constexpr (T == DType::f16) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + half));
  }
  return bf16_half(_mm512_loadu_si512(reinterpret_cast<const __m512i*>(p)), half);
}

// The same of a block that ends after `n` numbers, a multiple of 8 below 2 * LANES; zeros follow.
template <DType T>
KVSTRATA_INLINE Vec load_half(const char* p, int half, int n) {
  const uint32_t valid = (1u << n) - 1;
  if constexpr (T == DType::f32) {
    const __mmask16 mask = __mmask16(half ? valid >> LANES : valid);
    return _mm512_maskz_loadu_ps(mask, reinterpret_cast<const float*>(p) + half * LANES);
  }
  const __m512i x = _mm512_maskz_loadu_epi16(__mmask32(valid), p);
  if constexpr (T == DType::f16) {
    return _mm512_cvtph_ps(half ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x));
  }
  return bf16_half(x, half);
}

// From the order of `load_half<T>` to that of memory.
template <DType T>
KVSTRATA_INLINE void natural(Vec& a, Vec& b) {
  if constexpr (T == DType::bf16) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const Vec first = _mm512_permutex2var_ps(a, low, b);
    b = _mm512_permutex2var_ps(a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
    a = first;
  }
}

KVSTRATA_INLINE void prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }

}  // namespace kvstrata::KVSTRATA_ISA
