// The kernels of one instruction set; compiled once for each.
#include "kernels.h"

#include "cases.h"
#include "coded.h"
#include "exact.h"
#include "half.h"
#include "integer.h"
#include "scratch.h"
#include "softmax.h"

namespace kvstrata::KVSTRATA_ISA {
namespace {

int64_t scratch_bytes(int rows, int k_dim, int v_dim) {
  alignas(64) static char origin;
  return Scratch(&origin, rows, k_dim, v_dim).bytes;
}

template <DType T>
void exact_scores(const char* k, const Format& f, int n, int rows, const float* q, int64_t q_stride, float* s,
                  Prefetch next) {
  row_blocks(rows, [&](int r, auto block) {
    scores<T, block()>(k, f.k_dim, n, q + r * q_stride, q_stride, s + r * PAGE, next);
    next.at = next.end;
  });
}

template <DType T>
void exact_values(const char* v, const Format& f, int n, const Item& item, const float* p, Prefetch next) {
  row_blocks(item.rows, [&](int r, auto block) {
    values<T, block()>(v, f.v_dim, n, p + r * PAGE, item.acc + r * item.acc_stride, item.acc_stride, next);
    next.at = next.end;
  });
}

void coded_scores(const Page& page, const Format& f, int n, int rows, const Scratch& scratch, float* s, Prefetch next) {
  const Grid grid(f, scratch.grid);
  if (integer_scores(page.k, f, n, rows, grid, scratch, s, next)) return;
  decode_keys(f, page.k, grid, scratch.decoded);
  const char* keys = reinterpret_cast<const char*>(scratch.decoded);
  exact_scores<DType::f32>(keys, f, n, rows, scratch.q, scratch.q_stride, s, next);
}

void coded_values(const Page& page, const Format& f, int n, const Item& item, const Scratch& scratch, const float* p,
                  Prefetch next) {
  const Grid grid(f, scratch.grid);
  if (integer_values(page.v, f, item, grid, scratch, p, next)) return;
  decode_values(f, page.v, grid, scratch.decoded);
  exact_values<DType::f32>(reinterpret_cast<const char*>(scratch.decoded), f, n, item, p, next);
}

// s[r, t] = q[r] . k[t] of the first n entries of a page. Meanwhile its values are asked for.
void page_scores(const Page& page, const Format& f, int n, int rows, const Scratch& scratch, float* s) {
  const Prefetch next{page.v, page.v + f.v_bytes()};
  if (f.coded) {
    Grid(f, scratch.grid).read(f, page.grid);
    coded_scores(page, f, n, rows, scratch, s, next);
  } else {
    with_dtype(f.dtype, [&](auto dtype) {
      exact_scores<dtype()>(page.k, f, n, rows, scratch.q_exact, scratch.q_stride, s, next);
    });
  }
}

// acc[r] += sum over the first n entries of p[r, t] * v[t]. Meanwhile the keys of the next page are asked for.
void page_values(const Page& page, const Page* next_page, const Format& f, int n, const Item& item,
                 const Scratch& scratch, const float* p) {
  Prefetch next{nullptr, nullptr};
  if (next_page) {
    next = {next_page->k, next_page->k + f.k_bytes()};
    for (int64_t at = 0; at < f.grid_bytes(); at += 64) prefetch(next_page->grid + at);
  }
  if (f.coded) {
    coded_values(page, f, n, item, scratch, p, next);
  } else {
    with_dtype(f.dtype, [&](auto dtype) { exact_values<dtype()>(page.v, f, n, item, p, next); });
  }
}

// Turn the scores of page `at` of a tier into probabilities, row by row.
void softmax(const Item& item, const Entries& tier, bool own, int64_t at, float* s) {
  const int64_t first = at * PAGE;
  for (int r = 0; r < item.rows; ++r) {
    const int query = r / item.group;
    float* row = s + r * PAGE;
    if (item.softcap > 0) soften(item.softcap, row);
    const int64_t seen = tier.length - (own ? item.oldest_age - query : 0) - first, most = tier.pages[at].entries;
    const int n = int(seen < 0 ? 0 : seen < most ? seen : most);
    if (n < PAGE || item.after) {
      hide(row, n, item.after ? tier.positions + first : nullptr, item.after ? item.after[query] : 0);
    }
    soft_maximum(row, item.max[r], item.sum[r], item.acc + r * item.acc_stride, item.acc_stride);
  }
}

void begin(const Item& item, const Scratch& scratch) {
  const Format& f = item.tiers[0].format;
  for (int r = 0; r < item.rows; ++r) {
    const float* q = item.q + int64_t(r) * f.k_dim;
    arrange<DType::f32>(q, f.k_dim, scratch.q + r * scratch.q_stride);
    with_dtype(f.dtype, [&](auto dtype) { arrange<dtype()>(q, f.k_dim, scratch.q_exact + r * scratch.q_stride); });
    item.max[r] = -__builtin_inff();
    item.sum[r] = 0.0f;
    for (int64_t d = 0; d < item.acc_stride; ++d) item.acc[r * item.acc_stride + d] = 0.0f;
  }
}

void attend(const Item& item) {
  const Scratch scratch(item.scratch, item.rows, item.tiers[0].format.k_dim, item.tiers[0].format.v_dim);
  begin(item, scratch);
  int64_t page = 0;  // counted through all tiers
  for (int i = 0; i < item.tier_count; ++i) {
    const Entries& tier = item.tiers[i];
    const int64_t count = tier.page_count();
    for (int64_t at = item.first > page ? item.first - page : 0; at < count && page + at < item.last; ++at) {
      const int64_t done = page + at - item.first;
      const int n = tier.pages[at].entries;
      if (n == 0) continue;
      float* s = item.p ? item.p + done * item.rows * PAGE : scratch.s;
      page_scores(tier.pages[at], tier.format, n, item.rows, scratch, s);
      softmax(item, tier, i == 0, at, s);
      if (item.p) {
        for (int r = 0; r < item.rows; ++r) item.p_max[done * item.rows + r] = item.max[r];
      }
      const bool more = at + 1 < count && page + at + 1 < item.last;
      page_values(tier.pages[at], more ? &tier.pages[at + 1] : nullptr, tier.format, n, item, scratch, s);
    }
    page += count;
  }
}

void mass(const MassPage& page) {
  if (page.n == 0) return;
  alignas(64) float factors[MAX_ROWS];  // from a page's p to probabilities, over the group
  std::memcpy(factors, page.p_max, page.rows * sizeof(float));
  for (int r = 0; r < page.rows; r += LANES) {
    const Vec p_max = load(factors + r), factor = exp2(p_max - load(page.lse + r)) * set(1.0f / float(page.group));
    store(factors + r, p_max > set(LOWEST) ? factor : Vec{});  // a row that has seen nothing has p = 0 and lse -inf
  }
  alignas(64) float total[PAGE] = {};
  for (int query = 0; query < page.rows / page.group; ++query) {
    if (page.weights[query] == 0.0f) continue;
    const Vec weight = set(page.weights[query]), seen = set(page.seen ? page.seen[query] : 0.0f);
    for (int t = 0; t < PAGE; t += LANES) {
      Vec mean = {};
      for (int r = query * page.group; r < (query + 1) * page.group; ++r) {
        mean = fma(set(factors[r]), load(page.p + r * PAGE + t), mean);
      }
      if (page.seen) mean = mean * seen > set(1.0f) ? set(1.0f) : Vec{};
      store(total + t, fma(weight, mean, load(total + t)));
    }
  }
  for (int t = 0; t < page.n; ++t) page.out[t] += total[t];
}

void load_numbers(const char* from, DType dtype, int64_t n, float factor, float* to) {
  with_dtype(dtype, [&](auto t) {
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
      Vec a = load_half<t()>(from + i * item_size(t()), 0), b = load_half<t()>(from + i * item_size(t()), 1);
      natural<t()>(a, b);
      store(to + i, a * set(factor));
      store(to + i + LANES, b * set(factor));
    }
    if (i == n) return;
    alignas(64) float rest[BLOCK];
    Vec a = load_half<t()>(from + i * item_size(t()), 0, int(n - i));
    Vec b = load_half<t()>(from + i * item_size(t()), 1, int(n - i));
    natural<t()>(a, b);
    store(rest, a * set(factor));
    store(rest + LANES, b * set(factor));
    std::memcpy(to + i, rest, (n - i) * sizeof(float));
  });
}

void store_numbers(const float* from, float factor, int64_t n, DType dtype, char* to) {
  for (int64_t i = 0; i < n; ++i) {
    const float x = from[i] * factor;
    if (dtype == DType::f32) {
      std::memcpy(to + 4 * i, &x, 4);
    } else {
      const uint16_t h = dtype == DType::bf16 ? to_bf16(x) : to_half(x);
      std::memcpy(to + 2 * i, &h, 2);
    }
  }
}

uint64_t read_bytes(const char* from, int64_t bytes) {
  typedef uint64_t Words __attribute__((vector_size(LANES * 4)));
  Words sum[4] = {};
  int64_t i = 0;
  for (; i + int64_t(sizeof sum) <= bytes; i += sizeof sum) {
    for (int j = 0; j < 4; ++j) {
      Words x;
      std::memcpy(&x, from + i + j * sizeof x, sizeof x);
      sum[j] += x;
    }
  }
  const Words all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  uint64_t total = 0;
  for (int j = 0; j < LANES / 2; ++j) total += all[j];
  for (; i + 8 <= bytes; i += 8) {
    uint64_t x;
    std::memcpy(&x, from + i, 8);
    total += x;
  }
  for (; i < bytes; ++i) total += uint8_t(from[i]);
  return total;
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS = {scratch_bytes, attend, mass, load_numbers, store_numbers, read_bytes};

}  // namespace kvstrata::KVSTRATA_ISA
