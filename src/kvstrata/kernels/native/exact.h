// Pages in the dtype of the cache: scores of up to four rows at a time, and sums of values.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

// Asks for memory that the next phase reads, a little with every step of this one.
struct Prefetch {
  const char* at;
  const char* end;

  KVSTRATA_INLINE void step(int64_t bytes) {
    for (const char* stop = bytes < end - at ? at + bytes : end; at < stop; at += 64) prefetch(at);
  }
};

// Numbers of a row as `load_half<T>` orders them, padded with zeros to whole blocks.
template <DType T>
inline void arrange(const float* from, int dim, float* to) {
  for (int d = 0; d < dim; d += BLOCK) {
    for (int i = 0; i < BLOCK; ++i) {
      const int channel = d + (T == DType::bf16 ? 2 * (i % LANES) + i / LANES : i);
      to[d + i] = channel < dim ? from[channel] : 0.0f;
    }
  }
}

// s[r, t] = q[r] . k[t] for K keys from `k` on and R rows; q as arranged.
template <DType T, int R, int K>
KVSTRATA_INLINE void dot_products(const char* k, int dim, const float* q, int64_t q_stride, float* s) {
  constexpr int item = item_size(T);
  const int64_t row = int64_t(dim) * item;
  Vec sum[R][K] = {};
  const int whole = dim / BLOCK * BLOCK, rest = dim - whole;
  for (int d = 0; d < whole; d += BLOCK) {
    for (int half = 0; half < 2; ++half) {
      Vec query[R];
      for (int r = 0; r < R; ++r) query[r] = load(q + r * q_stride + d + half * LANES);
      for (int t = 0; t < K; ++t) {
        const Vec key = load_half<T>(k + t * row + d * item, half);
        for (int r = 0; r < R; ++r) sum[r][t] = fma(query[r], key, sum[r][t]);
      }
    }
  }
  if (rest) {
    for (int half = 0; half < 2; ++half) {
      for (int t = 0; t < K; ++t) {
        const Vec key = load_half<T>(k + t * row + whole * item, half, rest);
        for (int r = 0; r < R; ++r) sum[r][t] = fma(load(q + r * q_stride + whole + half * LANES), key, sum[r][t]);
      }
    }
  }
  for (int r = 0; r < R; ++r) reduce<K>(sum[r], s + r * PAGE);
}

// s[r, t] = q[r] . k[t] for the first n keys of a page; what follows in s is undefined.
template <DType T, int R>
void scores(const char* k, int dim, int n, const float* q, int64_t q_stride, float* s, Prefetch next) {
  constexpr int K = R == 1 ? 8 : R == 4 && LANES < 16 ? 2 : 4;  // as many sums as fit in registers
  const int64_t row = int64_t(dim) * item_size(T), share = (next.end - next.at) * K / PAGE + 64;
  for (int t = 0; t < n; t += K) {
    next.step(share);
    dot_products<T, R, K>(k + t * row, dim, q, q_stride, s + t);
  }
}

// acc[r, d..] += sum over n keys of p[r, t] * v[t, d..] for N blocks of channels, the last holding `rest` if not 0.
template <DType T, int R, int N>
KVSTRATA_INLINE void weighted_sum(const char* v, int64_t row, int n, int rest, const float* p, float* acc,
                                  int64_t acc_stride, Prefetch& next, int64_t share) {
  Vec sum[R][2 * N] = {};
  for (int t = 0; t < n; ++t, v += row) {
    next.step(share);
    Vec weight[R];
    for (int r = 0; r < R; ++r) weight[r] = set(p[r * PAGE + t]);
    for (int i = 0; i < 2 * N; ++i) {
      const char* block = v + (i / 2) * BLOCK * item_size(T);
      const Vec value = rest ? load_half<T>(block, i % 2, rest) : load_half<T>(block, i % 2);
      for (int r = 0; r < R; ++r) sum[r][i] = fma(weight[r], value, sum[r][i]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int i = 0; i < N; ++i) {
      float* to = acc + r * acc_stride + i * BLOCK;
      Vec a = sum[r][2 * i], b = sum[r][2 * i + 1];
      natural<T>(a, b);
      store(to, load(to) + a);
      store(to + LANES, load(to + LANES) + b);
    }
  }
}

// acc[r] += sum over the first n keys of a page of p[r, t] * v[t].
template <DType T, int R>
void values(const char* v, int dim, int n, const float* p, float* acc, int64_t acc_stride, Prefetch next) {
  constexpr int N = R == 1 ? 4 : R == 4 && LANES < 16 ? 1 : 2;
  constexpr int item = item_size(T);
  const int64_t row = int64_t(dim) * item;
  const int whole = dim / BLOCK * BLOCK;
  const int64_t share = round_up((next.end - next.at) / (int64_t(n) * (whole / (N * BLOCK) + 1)), 64);
  int d = 0;
  for (; d + N * BLOCK <= whole; d += N * BLOCK) {
    weighted_sum<T, R, N>(v + d * item, row, n, 0, p, acc + d, acc_stride, next, share);
  }
  for (; d < whole; d += BLOCK) {
    weighted_sum<T, R, 1>(v + d * item, row, n, 0, p, acc + d, acc_stride, next, share);
  }
  if (d < dim) weighted_sum<T, R, 1>(v + d * item, row, n, dim - d, p, acc + d, acc_stride, next, share);
}

}  // namespace kvstrata::KVSTRATA_ISA
