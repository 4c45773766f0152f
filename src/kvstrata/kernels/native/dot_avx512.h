// By vpdpbusd: a multiplier is two bytes, of which the upper counts 256 times.
#pragma once

#include <immintrin.h>

namespace kvstrata::KVSTRATA_ISA {

template <Side S>
KVSTRATA_INLINE float max_multiplier(int) {
  return S == Side::KEYS ? 32512.0f : 65535.0f;
}

struct Dot {
  __m512i upper, lower;
  KVSTRATA_INLINE Vec value() const {
    return fma(_mm512_cvtepi32_ps(upper), set(256.0f), _mm512_cvtepi32_ps(lower));
  }
};

struct Bytes {
  __m512i x;
};

KVSTRATA_INLINE Bytes load_bytes(const char* p) { return {_mm512_loadu_si512(reinterpret_cast<const __m512i*>(p))}; }

struct Codes {
  __m512i x;
};

// The codes of BITS bits at place `u` of each byte; 8-bit values are signed, and biased by 128 if FLIP.
template <Side S, int BITS, bool FLIP>
KVSTRATA_INLINE Codes unstack(Bytes b, int u) {
  if constexpr (BITS == 8) {
    return {S == Side::VALUES && FLIP ? _mm512_xor_si512(b.x, _mm512_set1_epi8(char(0x80))) : b.x};
  }
  return {_mm512_and_si512(_mm512_srli_epi16(b.x, unsigned(u * BITS)), _mm512_set1_epi8((1 << BITS) - 1))};
}

struct Multipliers {
  __m512i upper, lower;
};

KVSTRATA_INLINE Multipliers load_multipliers(const char* p) {
  int32_t upper, lower;
  std::memcpy(&upper, p, 4);
  std::memcpy(&lower, p + 4, 4);
  return {_mm512_set1_epi32(upper), _mm512_set1_epi32(lower)};
}

template <Side S>
KVSTRATA_INLINE void add_products(Dot& to, Codes c, Multipliers m) {
  if constexpr (S == Side::KEYS) {
    to.upper = _mm512_dpbusd_epi32(to.upper, c.x, m.upper);
    to.lower = _mm512_dpbusd_epi32(to.lower, c.x, m.lower);
  } else {
    to.upper = _mm512_dpbusd_epi32(to.upper, m.upper, c.x);
    to.lower = _mm512_dpbusd_epi32(to.lower, m.lower, c.x);
  }
}

template <Side S>
KVSTRATA_INLINE void arrange_multipliers(Vec x, char* to) {
  const __m512i all = _mm512_cvtps_epi32(x);
  // the lower byte of a key's multiplier is signed, so the upper one is rounded, not cut
  const __m512i upper = S == Side::KEYS ? _mm512_srai_epi32(_mm512_add_epi32(all, _mm512_set1_epi32(128)), 8)
                                        : _mm512_srli_epi32(all, 8);
  const __m128i u = _mm512_cvtepi32_epi8(upper), l = _mm512_cvtepi32_epi8(all);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_unpacklo_epi32(u, l));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + 1, _mm_unpackhi_epi32(u, l));
}

// Round 2 * LANES numbers and write them as multipliers, 4 * LANES bytes.
template <Side S>
KVSTRATA_INLINE void arrange_multipliers(Vec a, Vec b, char* to) {
  arrange_multipliers<S>(a, to);
  arrange_multipliers<S>(b, to + 2 * LANES);
}

}  // namespace kvstrata::KVSTRATA_ISA
