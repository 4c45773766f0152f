// The banded repeat of one instruction set; compiled once for each.
#include "echo.h"

#include <cmath>

#include "rows.h"
#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

extern const EchoKernels ECHO_KERNELS;

namespace {

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
constexpr float LEAST_REST = 1e-6f;  // as the reference
constexpr int AT_ONCE = 4;           // keys a step
constexpr int AHEAD = 6;             // queries that are asked for before their turn
constexpr int STEP = LANES < AT_ONCE ? AT_ONCE : LANES;
constexpr int SINKS = ECHO_SINKS + STEP, SCORES = SINKS + ECHO_WIDTH + STEP;

int64_t row_size(const Echo& echo) { return round_up(echo.dense.dim, LANES); }

// Rows and scores of n keys, in whole steps.
int whole(int n) { return int(round_up(n, STEP)); }

// Keys that the queries of ECHO_KEYS keys see, and up to AT_ONCE more.
int64_t keys_held(const Echo& echo) { return ECHO_KEYS + 2 * (echo.width - 1) + AT_ONCE; }

int64_t scratch_bytes(const Echo& echo) {
  return (1 + keys_held(echo) + 2 * whole(echo.sink_count)) * row_size(echo) * int64_t(sizeof(float));
}

// A row times a factor, zeros behind it: vectors may be wider than what is over. All zeros where there is none.
void load_padded(const char* from, const Echo& echo, float factor, float* to) {
  const Dense& dense = echo.dense;
  for (int64_t d = dense.dim / LANES * LANES; d < row_size(echo); ++d) to[d] = 0.0f;
  if (from) {
    load_row(from, dense.dtype, dense.dim, factor, to);
  } else {
    for (int d = 0; d < dense.dim; ++d) to[d] = 0.0f;
  }
}

void turn(const Echo& echo, float* row) {
  if (echo.neighbours) {
    for (int i = 0; i < echo.pairs; ++i) {
      const float a = row[2 * i], b = row[2 * i + 1];
      row[2 * i] = a * echo.cos[i] - b * echo.sin[i];
      row[2 * i + 1] = b * echo.cos[i] + a * echo.sin[i];
    }
    return;
  }
  float* other = row + echo.pairs;
  for (int i = 0; i < echo.pairs; ++i) {
    const float a = row[i], b = other[i];
    row[i] = a * echo.cos[i] - b * echo.sin[i];
    other[i] = b * echo.cos[i] + a * echo.sin[i];
  }
}

void load_turned(const char* from, const Echo& echo, float* to) {
  load_padded(from, echo, 1.0f, to);
  if (from) turn(echo, to);
}

// Scores s[i] = q . row i of n, a multiple of AT_ONCE.
void score(const Echo& echo, const float* q, const float* rows, int n, float* s) {
  const int64_t size = row_size(echo);
  for (int o = 0; o < n; o += AT_ONCE) {
    Vec sum[AT_ONCE] = {};
    for (int64_t d = 0; d < size; d += LANES) {
      const Vec x = load(q + d);
      for (int i = 0; i < AT_ONCE; ++i) sum[i] = fma(x, load(rows + (o + i) * size + d), sum[i]);
    }
    reduce<AT_ONCE>(sum, s + o);
  }
  if (echo.dense.softcap > 0) {
    for (int o = 0; o < n; ++o) s[o] = echo.dense.softcap * std::tanh(s[o]);
  }
}

void hide(float* s, int from, int to) {
  for (int i = from; i < to; ++i) s[i] = -__builtin_inff();
}

// Scores of the band whose first key has number `at`; -inf where there is none, also up to whole steps.
void score_band(const Echo& echo, const float* q, const float* keys, int64_t at, float* s) {
  const int count = int(round_up(echo.width, AT_ONCE));
  score(echo, q, keys, count, s);
  for (int o = 0; o < count; ++o) {
    if (at + o < echo.skip || at + o >= echo.dense.keys) s[o] = -__builtin_inff();
  }
  hide(s, echo.width, whole(echo.width));
}

// What query r saw itself without the sinks, in base 2. Rows `own` are the sinks as they are.
float without_sinks(const Echo& echo, const float* q, const float* own, int64_t r, float lse) {
  if (echo.sink_count == 0) return lse;
  alignas(64) float s[SINKS];
  const int64_t seen = echo.first + r + 1;
  score(echo, q, own, int(round_up(echo.sink_count, AT_ONCE)), s);
  hide(s, int(seen < echo.sink_count ? seen : echo.sink_count), whole(echo.sink_count));
  Vec sum = set(0.0f);
  for (int i = 0; i < whole(echo.sink_count); i += LANES) {
    const Vec less = maximum(set(0.0f), set(lse) - load(s + i));  // in this order NaN stays NaN; no sink is all there is
    sum = sum + exp2(set(0.0f) - less);
  }
  return lse + std::log2(most(1.0f - reduce_add(sum), LEAST_REST));
}

// log2-sum-exp2 of `rest` and n scores; NaN where one of them is.
float log_sum(float rest, const float* s, int n) {
  Vec highest = set(rest);
  for (int o = 0; o < n; o += LANES) highest = maximum(highest, load(s + o));
  const float top = reduce_max(highest);
  if (top == -__builtin_inff()) return top;
  Vec total = set(0.0f);
  for (int o = 0; o < n; o += LANES) total = total + exp2(load(s + o) - set(top));
  return top + std::log2(reduce_add(total) + exp2(rest - top));
}

void echo(const Echo& echo, int64_t first, int64_t last, float* best, char* scratch) {
  const Dense& dense = echo.dense;
  const int64_t size = row_size(echo), reach = echo.width - 1;
  const int sinks = whole(echo.sink_count), query_bytes = dense.dim * item_size(dense.dtype);
  float* q = reinterpret_cast<float*>(scratch);
  float *own = q + size, *later = own + sinks * size, *keys = later + sinks * size;
  for (int i = 0; i < sinks; ++i) {
    const char* sink = i < echo.sink_count ? echo.sinks + i * echo.sink_bytes : nullptr;
    load_padded(sink, echo, 1.0f, own + i * size);
    load_turned(sink, echo, later + i * size);
  }
  const int64_t from = first - reach, to = last + reach + AT_ONCE;  // keys of which the queries see some
  for (int64_t c = from; c < to; ++c) {
    const bool there = c >= 0 && c < dense.keys;
    load_turned(there ? dense.k + c * dense.key_bytes : nullptr, echo, keys + (c - from) * size);
  }
  const int64_t r_first = first - reach - echo.before - echo.low, r_last = last - echo.before - echo.low;
  for (int g = 0; g < dense.group; ++g) hide(best + g * dense.keys, int(first), int(last));
  for (int64_t r = r_first > 0 ? r_first : 0; r < r_last && r < dense.queries; ++r) {
    const int64_t at = r + echo.before + echo.low;
    for (int g = 0; g < dense.group; ++g) {  // the heads of one token often lie side by side
      float* out = best + g * dense.keys;
      alignas(64) float s[SCORES];  // of the sinks, then of the band
      float* band = s + sinks;
      const char* query = dense.q + g * dense.head_bytes + r * dense.query_bytes;
      for (int64_t i = 0; i < query_bytes; i += 64) prefetch(query + AHEAD * dense.query_bytes + i);
      load_padded(query, echo, dense.factor, q);
      score(echo, q, later, int(round_up(echo.sink_count, AT_ONCE)), s);
      hide(s, echo.sink_count, sinks);
      score_band(echo, q, keys + (at - from) * size, at, band);
      const float rest = without_sinks(echo, q, own, r, echo.lse[g * dense.queries + r] * LOG2_E);
      const float sum = log_sum(rest, s, sinks + whole(echo.width));
      if (sum == -__builtin_inff()) continue;
      const float less = echo.less[r];
      for (int o = 0; o < echo.width; ++o) {
        const int64_t c = at + o;
        if (c < first || c >= last || band[o] == -__builtin_inff()) continue;
        const float found = (band[o] - sum) * LN_2 - less;
        if (found > out[c]) out[c] = found;
      }
    }
  }
}

}  // namespace

const EchoKernels ECHO_KERNELS = {scratch_bytes, echo};

}  // namespace kvstrata::KVSTRATA_ISA
