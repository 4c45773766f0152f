// fp32 to the 16-bit types, rounded to nearest, ties to even.
#pragma once

#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

KVSTRATA_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

KVSTRATA_INLINE uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;   // NaN
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and above round to inf
  if (bits < 0x38800000) {                       // subnormal in fp16: adding 0.5 leaves multiples of 2^-24 and rounds
    float y;
    std::memcpy(&y, &bits, sizeof y);
    y += 0.5f;
    std::memcpy(&bits, &y, sizeof bits);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  return uint16_t(sign | ((bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13));
}

}  // namespace kvstrata::KVSTRATA_ISA
