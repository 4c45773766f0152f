// Coded pages: their grids in fp32, and pages decoded to be treated as exact ones where integer.h cannot serve.
#pragma once

#include "exact.h"
#include "kernels.h"
#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

// A grid in fp32: numbers at `from` in the dtype they are kept in.
inline void widen(const char* from, DType dtype, int n, float* to) {
  if (dtype == DType::f32) {
    std::memcpy(to, from, n * sizeof(float));
    return;
  }
  for (int i = 0; i < n; i += BLOCK) {
    alignas(64) float numbers[BLOCK];
    const int rest = n - i < BLOCK ? n - i : 0;
    Vec a, b;
    if (dtype == DType::bf16) {
      constexpr DType T = DType::bf16;
      a = rest ? load_half<T>(from + i * 2, 0, rest) : load_half<T>(from + i * 2, 0);
      b = rest ? load_half<T>(from + i * 2, 1, rest) : load_half<T>(from + i * 2, 1);
      natural<T>(a, b);
    } else {
      constexpr DType T = DType::f16;
      a = rest ? load_half<T>(from + i * 2, 0, rest) : load_half<T>(from + i * 2, 0);
      b = rest ? load_half<T>(from + i * 2, 1, rest) : load_half<T>(from + i * 2, 1);
    }
    store(numbers, a);
    store(numbers + LANES, b);
    std::memcpy(to + i, numbers, (rest ? rest : BLOCK) * sizeof(float));
  }
}

// The grid of one page in fp32. Keys are zero + scale * code; symmetric ones, whose codes are biased, have a zero too.
struct Grid {
  float *k_scale, *k_zero;  // [windows, D], rows padded to whole blocks
  float *v_scale, *v_zero;  // of tokens [64]; symmetric: v_scale of channels [Dv], no zero

  static int64_t numbers(const Format& f) {
    return 2 * (PAGE / f.window) * round_up(f.k_dim, BLOCK) + 2 * round_up(f.v_dim > PAGE ? f.v_dim : PAGE, BLOCK);
  }

  Grid(const Format& f, float* at) {
    const int64_t k = PAGE / f.window * round_up(f.k_dim, BLOCK);
    k_scale = at;
    k_zero = k_scale + k;
    v_scale = k_zero + k;
    v_zero = v_scale + round_up(f.v_dim > PAGE ? f.v_dim : PAGE, BLOCK);
  }

  void read(const Format& f, const char* from) {
    const DType dtype = f.grid_dtype();
    const int windows = PAGE / f.window;
    const int64_t row = round_up(f.k_dim, BLOCK), bytes = int64_t(f.k_dim) * item_size(dtype);
    for (int w = 0; w < windows; ++w) {
      float *scale = k_scale + w * row, *zero = k_zero + w * row;
      for (int64_t d = f.k_dim / BLOCK * BLOCK; d < row; ++d) scale[d] = zero[d] = 0.0f;
      widen(from + w * bytes, dtype, f.k_dim, scale);
      if (f.symmetric) {
        for (int d = 0; d < f.k_dim; ++d) zero[d] = -128.0f * scale[d];
      } else {
        widen(from + (windows + w) * bytes, dtype, f.k_dim, zero);
      }
    }
    from += (f.symmetric ? 1 : 2) * windows * bytes;
    widen(from, dtype, f.symmetric ? f.v_dim : PAGE, v_scale);
    if (!f.symmetric) widen(from + PAGE * item_size(dtype), dtype, PAGE, v_zero);
  }
};

// k [64, D] from codes [D/4][64][4].
inline void decode_keys(const Format& f, const char* codes, const Grid& grid, float* to) {
  const int per_byte = 8 / f.k_bits, mask = (1 << f.k_bits) - 1;
  const int64_t row = round_up(f.k_dim, BLOCK);
  for (int d = 0; d < f.k_dim; ++d) {
    const int quad = d / 4, shift = quad % per_byte * f.k_bits;
    const char* from = codes + int64_t(quad / per_byte) * PAGE * 4 + d % 4;
    for (int t = 0; t < PAGE; ++t) {
      const int64_t at = t / f.window * row + d;
      to[int64_t(t) * f.k_dim + d] = grid.k_zero[at] + grid.k_scale[at] * float(uint8_t(from[t * 4]) >> shift & mask);
    }
  }
}

// v [64, Dv] from codes [16][Dv][4].
inline void decode_values(const Format& f, const char* codes, const Grid& grid, float* to) {
  const int per_byte = 8 / f.v_bits, mask = (1 << f.v_bits) - 1;
  for (int t = 0; t < PAGE; ++t) {
    const int quad = t / 4, shift = quad % per_byte * f.v_bits;
    const char* from = codes + int64_t(quad / per_byte) * f.v_dim * 4 + t % 4;
    float* row = to + int64_t(t) * f.v_dim;
    if (f.symmetric) {
      for (int d = 0; d < f.v_dim; ++d) row[d] = grid.v_scale[d] * float(int8_t(from[d * 4]));
    } else {
      for (int d = 0; d < f.v_dim; ++d) {
        row[d] = grid.v_zero[t] + grid.v_scale[t] * float(uint8_t(from[d * 4]) >> shift & mask);
      }
    }
  }
}

}  // namespace kvstrata::KVSTRATA_ISA
