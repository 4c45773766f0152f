// The banded repeat of one instruction set; compiled once for each.
#include "echo.h"

#include <cmath>

#include "rows.h"
#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

extern const EchoKernels ECHO_KERNELS;

namespace {

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
constexpr int AT_ONCE = 4;  // keys a step

int64_t row_size(const Echo& echo) { return round_up(echo.dense.dim, LANES); }

// Keys that the queries of ECHO_KEYS keys see, and up to AT_ONCE more.
int64_t keys_held(const Echo& echo) { return ECHO_KEYS + 2 * (echo.width - 1) + AT_ONCE; }

int64_t scratch_bytes(const Echo& echo) { return (keys_held(echo) + 1) * row_size(echo) * int64_t(sizeof(float)); }

// Row of zeros behind what is loaded: vectors may be wider than what is over.
void load_padded(const char* from, const Echo& echo, float factor, float* to) {
  const Dense& dense = echo.dense;
  for (int64_t d = dense.dim / LANES * LANES; d < row_size(echo); ++d) to[d] = 0.0f;
  if (from) {
    load_row(from, dense.dtype, dense.dim, factor, to);
  } else {
    for (int d = 0; d < dense.dim; ++d) to[d] = 0.0f;
  }
}

// Scores that are kept of a query: whole vectors, and whole steps.
int held(const Echo& echo) { return int(round_up(echo.width, LANES < AT_ONCE ? AT_ONCE : LANES)); }

// Scores s[o] = q . key of number `at` + o; ones that are not there are -inf, also up to `held`.
void score(const Echo& echo, const float* q, const float* keys, int64_t at, float* s) {
  const int64_t size = row_size(echo);
  for (int o = 0; o < echo.width; o += AT_ONCE) {
    Vec sum[AT_ONCE] = {};
    for (int64_t d = 0; d < size; d += LANES) {
      const Vec x = load(q + d);
      for (int i = 0; i < AT_ONCE; ++i) sum[i] = fma(x, load(keys + (o + i) * size + d), sum[i]);
    }
    reduce<AT_ONCE>(sum, s + o);
  }
  for (int o = 0; o < held(echo); ++o) {
    const bool there = o < echo.width && at + o >= echo.skip && at + o < echo.dense.keys;
    if (!there) {
      s[o] = -__builtin_inff();
    } else if (echo.dense.softcap > 0) {
      s[o] = echo.dense.softcap * std::tanh(s[o]);
    }
  }
}

// log2-sum-exp2 of `rest` and n scores; NaN where one of them is.
float log_sum(float rest, const float* s, int n) {
  float top = rest;
  for (int o = 0; o < n; ++o) top = most(top, s[o]);
  if (top == -__builtin_inff()) return top;
  Vec total = set(0.0f);
  for (int o = 0; o < n; o += LANES) total = total + exp2(load(s + o) - set(top));
  return top + std::log2(reduce_add(total) + exp2(rest - top));
}

void echo(const Echo& echo, int64_t first, int64_t last, float* best, char* scratch) {
  const Dense& dense = echo.dense;
  const int64_t size = row_size(echo), reach = echo.width - 1;
  float* q = reinterpret_cast<float*>(scratch);
  float* keys = q + size;
  const int64_t from = first - reach, to = last + reach + AT_ONCE;  // keys of which the queries see some
  for (int64_t c = from; c < to; ++c) {
    const bool there = c >= 0 && c < dense.keys;
    load_padded(there ? dense.k + c * dense.key_bytes : nullptr, echo, 1.0f, keys + (c - from) * size);
  }
  const int64_t r_first = first - reach - echo.before - echo.low, r_last = last - echo.before - echo.low;
  for (int g = 0; g < dense.group; ++g) {
    float* out = best + g * dense.keys;
    for (int64_t c = first; c < last; ++c) out[c] = -__builtin_inff();
    for (int64_t r = r_first > 0 ? r_first : 0; r < r_last && r < dense.queries; ++r) {
      const int64_t at = r + echo.before + echo.low;
      alignas(64) float s[ECHO_WIDTH];
      load_padded(dense.q + g * dense.head_bytes + r * dense.query_bytes, echo, dense.factor, q);
      score(echo, q, keys + (at - from) * size, at, s);
      const float sum = log_sum(echo.base[g * dense.queries + r] * LOG2_E, s, held(echo));
      if (sum == -__builtin_inff()) continue;
      const float less = echo.less[r];
      for (int o = 0; o < echo.width; ++o) {
        const int64_t c = at + o;
        if (c < first || c >= last || s[o] == -__builtin_inff()) continue;
        const float found = (s[o] - sum) * LN_2 - less;
        if (found > out[c]) out[c] = found;
      }
    }
  }
}

}  // namespace

const EchoKernels ECHO_KERNELS = {scratch_bytes, echo};

}  // namespace kvstrata::KVSTRATA_ISA
