// Four lanes in the vector extension of gcc and clang: SSE2, NEON or whatever the machine has.
#pragma once

namespace kvstrata::KVSTRATA_ISA {

typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
constexpr int LANES = 4;

KVSTRATA_INLINE Vec set(float x) { return Vec{x, x, x, x}; }

KVSTRATA_INLINE Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

KVSTRATA_INLINE void store(float* p, Vec x) { std::memcpy(p, &x, sizeof x); }
KVSTRATA_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
KVSTRATA_INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// Of |x| < 2^22: adding 1.5 * 2^23 leaves no bits for a fraction.
KVSTRATA_INLINE Vec round(Vec x) { return (x + set(12582912.0f)) - set(12582912.0f); }

// 2^n of a whole n in [-127, 127]; 2^-127 gives 0.
KVSTRATA_INLINE Vec power_of_two(Vec n) {
  const Ints biased = __builtin_convertvector(n, Ints) + 127;
  const Ints bits = biased << 23;
  return (Vec)bits;
}

KVSTRATA_INLINE float reduce_max(Vec x) {
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
}

KVSTRATA_INLINE float reduce_add(Vec x) { return (x[0] + x[1]) + (x[2] + x[3]); }

// Sums of the lanes of N vectors, side by side.
template <int N>
KVSTRATA_INLINE void reduce(const Vec* x, float* to) {
  for (int i = 0; i < N; ++i) to[i] = reduce_add(x[i]);
}

KVSTRATA_INLINE float from_half(uint16_t h) {
  // Exponent and mantissa moved into place, then scaled by 2^112: right for subnormals too; inf and NaN need theirs.
  const uint32_t magnitude = uint32_t(h & 0x7fff) << 13;
  uint32_t bits = magnitude;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  x *= 0x1p112f;
  std::memcpy(&bits, &x, sizeof x);
  if (magnitude >= 0x0f800000u) bits = magnitude | 0x7f800000u;
  bits |= uint32_t(h & 0x8000) << 16;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <DType T>
KVSTRATA_INLINE Vec load_half(const char* p, int half) {
  if constexpr (T == DType::f32) return load(reinterpret_cast<const float*>(p) + half * LANES);
  if constexpr (T == DType::f16) {
    uint16_t x[LANES];
    std::memcpy(x, p + half * LANES * 2, sizeof x);
    return Vec{from_half(x[0]), from_half(x[1]), from_half(x[2]), from_half(x[3])};
  }
  uint16_t x[2 * LANES];
  std::memcpy(x, p, sizeof x);
  const auto bits = [&](int i) { return int32_t(uint32_t(x[2 * i + half]) << 16); };
  return (Vec)Ints{bits(0), bits(1), bits(2), bits(3)};
}

// A block never ends early: dimensions are multiples of 8.
template <DType T>
KVSTRATA_INLINE Vec load_half(const char* p, int half, int) {
  return load_half<T>(p, half);
}

// From the order of `load_half<T>` to that of memory.
template <DType T>
KVSTRATA_INLINE void natural(Vec& a, Vec& b) {
  if constexpr (T == DType::bf16) {
    const Vec even = a, odd = b;
    a = Vec{even[0], odd[0], even[1], odd[1]};
    b = Vec{even[2], odd[2], even[3], odd[3]};
  }
}

KVSTRATA_INLINE void prefetch(const char* p) { __builtin_prefetch(p); }

}  // namespace kvstrata::KVSTRATA_ISA
