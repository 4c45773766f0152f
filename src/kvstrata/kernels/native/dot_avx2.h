// By vpmaddwd: codes widened to 16 bits, even and odd bytes apart.
#pragma once

#include <immintrin.h>

namespace kvstrata::KVSTRATA_ISA {

// The largest multiplier whose products with `count` codes cannot overflow a sum.
template <Side>
KVSTRATA_INLINE float max_multiplier(int count) {
  return count <= 256 ? 32767.0f : float(0x7fffffff / 255 / count);
}

struct Dot {
  __m256i sum;
  KVSTRATA_INLINE Vec value() const { return _mm256_cvtepi32_ps(sum); }
};

struct Bytes {
  __m256i x;
};

KVSTRATA_INLINE Bytes load_bytes(const char* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }

struct Codes {
  __m256i even, odd;
};

// The codes of BITS bits at place `u` of each byte; 8-bit values are signed, and biased by 128 if FLIP.
template <Side S, int BITS, bool FLIP>
KVSTRATA_INLINE Codes unstack(Bytes b, int u) {
  if constexpr (S == Side::VALUES && BITS == 8) {
    const __m256i x = FLIP ? _mm256_xor_si256(b.x, _mm256_set1_epi8(char(0x80))) : b.x;
    return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
  }
  const __m256i mask = _mm256_set1_epi16((1 << BITS) - 1);
  return {_mm256_and_si256(_mm256_srli_epi16(b.x, u * BITS), mask),
          _mm256_and_si256(_mm256_srli_epi16(b.x, 8 + u * BITS), mask)};
}

struct Multipliers {
  __m256i even, odd;
};

KVSTRATA_INLINE Multipliers load_multipliers(const char* p) {
  int32_t even, odd;
  std::memcpy(&even, p, 4);
  std::memcpy(&odd, p + 4, 4);
  return {_mm256_set1_epi32(even), _mm256_set1_epi32(odd)};
}

template <Side>
KVSTRATA_INLINE void add_products(Dot& to, Codes c, Multipliers m) {
  to.sum = _mm256_add_epi32(to.sum, _mm256_madd_epi16(c.even, m.even));
  to.sum = _mm256_add_epi32(to.sum, _mm256_madd_epi16(c.odd, m.odd));
}

// Round 2 * LANES numbers and write them as multipliers, 4 * LANES bytes.
template <Side>
KVSTRATA_INLINE void arrange_multipliers(Vec a, Vec b, char* to) {
  const __m256i packed = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
  const __m256i ordered = _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
  const __m256i even_first = _mm256_set_epi8(15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0,  //
                                             15, 14, 11, 10, 13, 12, 9, 8, 7, 6, 3, 2, 5, 4, 1, 0);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_shuffle_epi8(ordered, even_first));
}

}  // namespace kvstrata::KVSTRATA_ISA
