// Scores and sums of coded pages in integers: queries and probabilities become 16-bit multipliers with the grid folded
// in, and codes are never widened to floats. See dot.h.
#pragma once

#include "cases.h"
#include "coded.h"
#include "dot.h"
#include "exact.h"
#include "scratch.h"

namespace kvstrata::KVSTRATA_ISA {

#if defined(KVSTRATA_ISA_AVX2) || defined(KVSTRATA_ISA_AVX512)

// q[d] * scale[d] of a row as multipliers, and its q . zero. All padded to whole blocks with zeros.
KVSTRATA_INLINE Step quantise_query(const float* q, const float* scale, const float* zero, int padded, float limit,
                                    char* to) {
  Vec largest = {}, bias = {};
  for (int d = 0; d < padded; d += LANES) {
    const Vec x = load(q + d), y = x * load(scale + d);
    largest = maximum(largest, maximum(y, -y));
    bias = fma(x, load(zero + d), bias);
  }
  const float top = reduce_max(largest), factor = top > 0.0f ? limit / top : 0.0f;
  for (int d = 0; d < padded; d += BLOCK) {
    const Vec a = load(q + d) * load(scale + d), b = load(q + d + LANES) * load(scale + d + LANES);
    arrange_multipliers<Side::KEYS>(a * set(factor), b * set(factor), to + d * 2);
  }
  return {top / limit, reduce_add(bias)};
}

// p[t] * scale[t] of a page's 64 slots as multipliers, and its p . zero. Grids of slots with p = 0 may be NaN.
KVSTRATA_INLINE Step quantise_weights(const float* p, const float* scale, const float* zero, float limit, char* to) {
  Vec y[PAGE / LANES], largest = {}, bias = {};
  for (int i = 0; i < PAGE / LANES; ++i) {
    const Vec x = load(p + i * LANES);
    if (scale) {
      y[i] = x > Vec{} ? x * load(scale + i * LANES) : Vec{};
      bias = bias + (x > Vec{} ? x * load(zero + i * LANES) : Vec{});
    } else {
      y[i] = x;
    }
    largest = maximum(largest, y[i]);
  }
  const float top = reduce_max(largest), factor = top > 1e-30f ? limit / top : 0.0f;
  for (int i = 0; i < PAGE / LANES; i += 2) {
    arrange_multipliers<Side::VALUES>(y[i] * set(factor), y[i + 1] * set(factor), to + i * LANES * 2);
  }
  return {top / limit, reduce_add(bias)};
}

// Sums over `groups` of four codes each, of R rows and N vectors: codes [groups / per byte][width][4].
template <Side S, int BITS, bool FLIP, int R, int N>
KVSTRATA_INLINE void dots(const char* codes, int64_t width, int groups, const char* multipliers, int64_t stride,
                          Dot (&sum)[R][N], Prefetch& next, int64_t share) {
  constexpr int per_byte = 8 / BITS;
  for (int j = 0; j < groups; j += per_byte, codes += width * 4) {
    next.step(share);
    Bytes bytes[N];
    for (int n = 0; n < N; ++n) bytes[n] = load_bytes(codes + n * LANES * 4);
#pragma GCC unroll 4
    for (int u = 0; u < per_byte; ++u) {
      Codes c[N];
      for (int n = 0; n < N; ++n) c[n] = unstack<S, BITS, FLIP>(bytes[n], u);
      for (int r = 0; r < R; ++r) {
        const Multipliers m = load_multipliers(multipliers + r * stride + (j + u) * 8);
        for (int n = 0; n < N; ++n) add_products<S>(sum[r][n], c[n], m);
      }
    }
  }
}

constexpr int vectors_at_once(int rows) { return LANES < 16 ? (rows == 1 ? 4 : 2) : rows <= 3 ? 4 : 2; }

// s[r, t] for the slots first .. first + count - 1 that share a key grid.
template <int BITS, int R>
void scores_of_window(const char* k, int dim, int first, int count, const char* multipliers, int64_t stride,
                    const Step* steps, float* s, Prefetch next) {
  constexpr int N = vectors_at_once(R);
  const int64_t share = round_up((next.end - next.at) * 4 * N * LANES / (int64_t(dim) * count) * (8 / BITS), 64);
  const auto run = [&](int t, auto n) {
    Dot sum[R][n()] = {};
    dots<Side::KEYS, BITS, false>(k + t * 4, PAGE, dim / 4, multipliers, stride, sum, next, share);
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < n(); ++i) {
        store(s + r * PAGE + t + i * LANES, fma(sum[r][i].value(), set(steps[r].step), set(steps[r].bias)));
      }
    }
  };
  int t = first;
  for (; t + N * LANES <= first + count; t += N * LANES) run(t, std::integral_constant<int, N>());
  for (; t < first + count; t += LANES) run(t, std::integral_constant<int, 1>());
}

// acc[r, d] += sum over the page of multipliers * codes; times channel_scale where there is one.
template <int BITS, bool FLIP, int R>
void values_of_page(const char* v, int dim, const char* multipliers, int64_t stride, const Step* steps,
                    const float* channel_scale, float* acc, int64_t acc_stride, Prefetch next) {
  constexpr int N = vectors_at_once(R);
  const int64_t share = round_up((next.end - next.at) * 4 * N * LANES / (int64_t(dim) * PAGE) * (8 / BITS), 64);
  const auto run = [&](int d, auto n) {
    Dot sum[R][n()] = {};
    dots<Side::VALUES, BITS, FLIP>(v + d * 4, dim, PAGE / 4, multipliers, stride, sum, next, share);
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < n(); ++i) {
        const int at = d + i * LANES;
        float* to = acc + r * acc_stride + at;
        const Vec x = sum[r][i].value() * set(steps[r].step);
        store(to, channel_scale ? fma(x, load(channel_scale + at), load(to)) : load(to) + (x + set(steps[r].bias)));
      }
    }
  };
  int d = 0;
  for (; d + N * LANES <= dim; d += N * LANES) run(d, std::integral_constant<int, N>());
  for (; d < dim; d += LANES) run(d, std::integral_constant<int, 1>());
}

// s[r, t] = q[r] . k[t] of the first n entries of a page, unless a window is shorter than a vector.
inline bool integer_scores(const char* k, const Format& f, int n, int rows, const Grid& grid, const Scratch& scratch,
                           float* s, Prefetch next) {
  if (f.window % LANES != 0) return false;
  const int64_t stride = scratch.q_stride;
  const float limit = max_multiplier<Side::KEYS>(f.k_dim);
  for (int first = 0, w = 0; first < n; first += f.window, ++w) {
    for (int r = 0; r < rows; ++r) {
      scratch.steps[r] = quantise_query(scratch.q + r * stride, grid.k_scale + w * stride, grid.k_zero + w * stride,
                                        int(stride), limit, scratch.multipliers + r * stride * 2);
    }
    with_bits(f.k_bits, [&](auto bits) {
      row_blocks(rows, [&](int r, auto block) {
        scores_of_window<bits(), block()>(k, f.k_dim, first, f.window, scratch.multipliers + r * stride * 2, stride * 2,
                                          scratch.steps + r, s + r * PAGE, next);
        next.at = next.end;
      });
    });
  }
  return true;
}

// acc[r] += sum over entries of p[r, t] * v[t].
inline bool integer_values(const char* v, const Format& f, const Item& item, const Grid& grid, const Scratch& scratch,
                           const float* p, Prefetch next) {
  const bool biased = !f.symmetric && f.v_bits == 8;
  for (int t = 0; biased && t < PAGE; ++t) grid.v_zero[t] += 128.0f * grid.v_scale[t];
  const float limit = max_multiplier<Side::VALUES>(PAGE);
  for (int r = 0; r < item.rows; ++r) {
    scratch.steps[r] = quantise_weights(p + r * PAGE, f.symmetric ? nullptr : grid.v_scale, grid.v_zero, limit,
                                        scratch.multipliers + r * PAGE * 2);
  }
  with_bits(f.v_bits, [&](auto bits) {
    row_blocks(item.rows, [&](int r, auto block) {
      constexpr bool may_be_biased = bits() == 8;
      const auto add = biased ? values_of_page<bits(), may_be_biased, block()> : values_of_page<bits(), false, block()>;
      add(v, f.v_dim, scratch.multipliers + r * PAGE * 2, PAGE * 2, scratch.steps + r,
          f.symmetric ? grid.v_scale : nullptr, item.acc + r * item.acc_stride, item.acc_stride, next);
      next.at = next.end;
    });
  });
  return true;
}

#else

inline bool integer_scores(const char*, const Format&, int, int, const Grid&, const Scratch&, float*, Prefetch) {
  return false;
}

inline bool integer_values(const char*, const Format&, const Item&, const Grid&, const Scratch&, const float*,
                           Prefetch) {
  return false;
}

#endif

}  // namespace kvstrata::KVSTRATA_ISA
