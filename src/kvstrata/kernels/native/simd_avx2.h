// AVX2, FMA, F16C: eight lanes.
#pragma once

#include <immintrin.h>

namespace kvstrata::KVSTRATA_ISA {

using Vec = __m256;
constexpr int LANES = 8;

KVSTRATA_INLINE Vec set(float x) { return _mm256_set1_ps(x); }
KVSTRATA_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
KVSTRATA_INLINE void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
KVSTRATA_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
KVSTRATA_INLINE Vec maximum(Vec a, Vec b) { return _mm256_max_ps(a, b); }
KVSTRATA_INLINE Vec round(Vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// 2^n of a whole n in [-127, 127]; 2^-127 gives 0.
KVSTRATA_INLINE Vec power_of_two(Vec n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}

KVSTRATA_INLINE float reduce_max(Vec x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

KVSTRATA_INLINE float reduce_add(Vec x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

// Sums of the lanes of N vectors, side by side.
template <int N>
KVSTRATA_INLINE void reduce(const Vec* x, float* to) {
  if constexpr (N % 4 == 0) {
    for (int i = 0; i < N; i += 4) {
      const Vec y = _mm256_hadd_ps(_mm256_hadd_ps(x[i], x[i + 1]), _mm256_hadd_ps(x[i + 2], x[i + 3]));
      _mm_storeu_ps(to + i, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
    }
  } else {
    for (int i = 0; i < N; ++i) to[i] = reduce_add(x[i]);
  }
}

KVSTRATA_INLINE Vec even_bf16(__m256i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
KVSTRATA_INLINE Vec odd_bf16(__m256i x) {
  return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))));
}

template <DType T>
KVSTRATA_INLINE Vec load_half(const char* p, int half) {
  if constexpr (T == DType::f32) return load(reinterpret_cast<const float*>(p) + half * LANES);
  if constexpr (T == DType::f16) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + half));
  }
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return half ? odd_bf16(x) : even_bf16(x);
}

// The same of a block that ends after `n` numbers; zeros follow. n is a multiple of 8 below 2 * LANES: 8.
template <DType T>
KVSTRATA_INLINE Vec load_half(const char* p, int half, int n) {
  (void)n;
  if constexpr (T == DType::f32) return half ? _mm256_setzero_ps() : load(reinterpret_cast<const float*>(p));
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  if constexpr (T == DType::f16) return half ? _mm256_setzero_ps() : _mm256_cvtph_ps(x);
  const __m256i y = _mm256_inserti128_si256(_mm256_setzero_si256(), x, 0);
  return half ? odd_bf16(y) : even_bf16(y);
}

// From the order of `load_half<T>` to that of memory.
template <DType T>
KVSTRATA_INLINE void natural(Vec& a, Vec& b) {
  if constexpr (T == DType::bf16) {
    const Vec low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
    a = _mm256_permute2f128_ps(low, high, 0x20);
    b = _mm256_permute2f128_ps(low, high, 0x31);
  }
}

KVSTRATA_INLINE void prefetch(const char* p) { _mm_prefetch(p, _MM_HINT_T0); }

}  // namespace kvstrata::KVSTRATA_ISA
