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

void coded_scores(const Page& page, const Format& f, int n, int rows, const Scratch& scratch, const Grid& grid,
                  float* s, Prefetch next) {
  if (integer_scores(page.k, f, n, rows, grid, scratch, s, next)) return;
  decode_keys(f, page.k, grid, scratch.decoded);
  const char* keys = reinterpret_cast<const char*>(scratch.decoded);
  exact_scores<DType::f32>(keys, f, n, rows, scratch.q, scratch.q_stride, s, next);
}

void coded_values(const Page& page, const Format& f, int n, const Item& item, const Scratch& scratch, const Grid& grid,
                  const float* p, Prefetch next) {
  if (integer_values(page.v, f, item, grid, scratch, p, next)) return;
  decode_values(f, page.v, grid, scratch.decoded);
  exact_values<DType::f32>(reinterpret_cast<const char*>(scratch.decoded), f, n, item, p, next);
}

// Pages of one tier that go through the phases together.
struct Group {
  int count = 0;
  int64_t at[PAGES_AT_ONCE];  // pages of the tier
  float* s[PAGES_AT_ONCE];    // [rows, PAGE], scores and then p
};

Prefetch keys_of(const Page& page, const Format& f) {
  for (int64_t at = 0; at < f.grid_bytes(); at += 64) prefetch(page.grid + at);
  return {page.k, page.k + f.k_bytes()};
}

// s[r, t] = q[r] . k[t] of the first n entries of every page. Meanwhile what comes next is asked for.
void group_scores(const Group& group, const Entries& tier, int rows, const Scratch& scratch) {
  const Format& f = tier.format;
  for (int i = 0; i < group.count; ++i) {
    const Page &page = tier.pages[group.at[i]], &first = tier.pages[group.at[0]];
    const Prefetch next =
        i + 1 < group.count ? keys_of(tier.pages[group.at[i + 1]], f) : Prefetch{first.v, first.v + f.v_bytes()};
    if (f.coded) {
      Grid grid(f, scratch.grid + i * scratch.grid_stride);
      grid.read(f, page.grid);
      coded_scores(page, f, page.entries, rows, scratch, grid, group.s[i], next);
    } else {
      with_dtype(f.dtype, [&](auto dtype) {
        exact_scores<dtype()>(page.k, f, page.entries, rows, scratch.q_exact, scratch.q_stride, group.s[i], next);
      });
    }
  }
}

// acc[r] += sum over the entries of every page of p[r, t] * v[t]. `after` is the page whose keys are read next, or null.
void group_values(const Group& group, const Entries& tier, const Page* after, const Item& item,
                  const Scratch& scratch) {
  const Format& f = tier.format;
  for (int i = 0; i < group.count; ++i) {
    const Page& page = tier.pages[group.at[i]];
    Prefetch next{nullptr, nullptr};
    if (i + 1 < group.count) {
      const Page& following = tier.pages[group.at[i + 1]];
      next = {following.v, following.v + f.v_bytes()};
    } else if (after) {
      next = keys_of(*after, f);
    }
    if (f.coded) {
      const Grid grid(f, scratch.grid + i * scratch.grid_stride);
      coded_values(page, f, page.entries, item, scratch, grid, group.s[i], next);
    } else {
      with_dtype(f.dtype, [&](auto dtype) {
        exact_values<dtype()>(page.v, f, page.entries, item, group.s[i], next);
      });
    }
  }
}

// Turn scores of a tier's pages into probabilities, row by row.
void softmax(const Item& item, const Entries& tier, bool own, const Group& group) {
  for (int r = 0; r < item.rows; ++r) {
    const int query = r / item.group;
    float* rows[PAGES_AT_ONCE];
    for (int i = 0; i < group.count; ++i) {
      const int64_t first = group.at[i] * PAGE;
      float* row = rows[i] = group.s[i] + r * PAGE;
      if (item.softcap > 0) soften(item.softcap, row);
      const int64_t seen = tier.length - (own ? item.oldest_age - query : 0) - first;
      const int64_t most = tier.pages[group.at[i]].entries;
      const int n = int(seen < 0 ? 0 : seen < most ? seen : most);
      if (n < PAGE || item.after) {
        hide(row, n, item.after ? tier.positions + first : nullptr, item.after ? item.after[query] : 0);
      }
    }
    soft_maximum(rows, group.count, item.max[r], item.sum[r], item.acc + r * item.acc_stride, item.acc_stride);
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

// The next pages of a tier that hold entries, from `at` on, which moves behind them; `page` counts those of tiers before.
Group take_pages(const Item& item, const Entries& tier, int64_t page, int64_t& at, const Scratch& scratch) {
  Group group;
  const int64_t count = tier.page_count();
  for (; at < count && page + at < item.last && group.count < pages_at_once(item.rows); ++at) {
    if (tier.pages[at].entries == 0) continue;
    group.at[group.count] = at;
    group.s[group.count] = item.p ? item.p + (page + at - item.first) * item.rows * PAGE
                                  : scratch.s + int64_t(group.count) * item.rows * PAGE;
    ++group.count;
  }
  return group;
}

void attend(const Item& item) {
  const Scratch scratch(item.scratch, item.rows, item.tiers[0].format.k_dim, item.tiers[0].format.v_dim);
  begin(item, scratch);
  int64_t page = 0;  // counted through all tiers
  for (int i = 0; i < item.tier_count; ++i) {
    const Entries& tier = item.tiers[i];
    const int64_t count = tier.page_count();
    for (int64_t at = item.first > page ? item.first - page : 0; at < count && page + at < item.last;) {
      const Group group = take_pages(item, tier, page, at, scratch);
      if (group.count == 0) break;
      group_scores(group, tier, item.rows, scratch);
      softmax(item, tier, i == 0, group);
      for (int j = 0; item.p && j < group.count; ++j) {
        std::memcpy(item.p_max + (page + group.at[j] - item.first) * item.rows, item.max, item.rows * sizeof(float));
      }
      group_values(group, tier, at < count && page + at < item.last ? &tier.pages[at] : nullptr, item, scratch);
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
