// Column sums of one instruction set; compiled once for each.
//
// Scores are products of matrices: MASS_KEYS keys are packed so that a step down the channels reads one vector after
// the other, and blocks of queries pass over them. What is made of a block of scores happens while it is in the cache.
#include "mass.h"

#include "rows.h"
#include "simd.h"
#include "softmax.h"

namespace kvstrata::KVSTRATA_ISA {

extern const MassKernels MASS_KERNELS;

namespace {

constexpr int TILE_ROWS = LANES < 16 ? 6 : 12;  // with two vectors of keys: as many sums as fit in registers
constexpr int TILE_KEYS = 2 * LANES;
constexpr int ROWS = 48;  // queries x group at once
constexpr float LOG2_E = 1.44269504f;

// A row is query row / group and head row % group of a block.
int64_t queries_at_once(const Dense& dense) { return dense.group < ROWS ? ROWS / dense.group : 1; }

struct Scratch {
  float* keys;  // [MASS_KEYS / PAGE][PAGE / TILE_KEYS][dim][TILE_KEYS]
  float* q;     // [rows, dim]
  float* s;     // [rows, PAGE]
  float* row;   // [dim]
  int64_t bytes;

  Scratch(char* at, const Dense& dense) {
    const int64_t rows = round_up(queries_at_once(dense) * dense.group, TILE_ROWS);
    keys = reinterpret_cast<float*>(at);
    q = keys + MASS_KEYS * dense.dim;
    s = q + round_up(rows * dense.dim, 16);
    row = s + rows * PAGE;
    bytes = reinterpret_cast<char*>(row + round_up(dense.dim, 16)) - at;
  }
};

int64_t scratch_bytes(const Dense& dense) {
  alignas(64) static char origin;
  return Scratch(&origin, dense).bytes;
}

// n keys from `first` on, and zeros up to whole pages.
void pack_keys(const Dense& dense, int64_t first, int64_t n, const Scratch& scratch) {
  for (int64_t t = 0; t < round_up(n, PAGE); ++t) {
    float* to = scratch.keys + t / TILE_KEYS * TILE_KEYS * dense.dim + t % TILE_KEYS;
    if (t < n) {
      load_row(dense.k + (first + t) * dense.key_bytes, dense.dtype, dense.dim, 1.0f, scratch.row);
      for (int d = 0; d < dense.dim; ++d) to[d * TILE_KEYS] = scratch.row[d];
    } else {
      for (int d = 0; d < dense.dim; ++d) to[d * TILE_KEYS] = 0.0f;
    }
  }
}

// `count` queries from `first` on, times the factor, and zeros up to whole tiles.
void load_queries(const Dense& dense, int64_t first, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) {
    for (int g = 0; g < dense.group; ++g, to += dense.dim) {
      load_row(dense.q + g * dense.head_bytes + (first + i) * dense.query_bytes, dense.dtype, dense.dim, dense.factor, to);
    }
  }
  const int64_t rows = count * dense.group;
  for (int64_t i = 0; i < (round_up(rows, TILE_ROWS) - rows) * dense.dim; ++i) to[i] = 0.0f;
}

// s[r, t] = q[r] . k[t] of one tile; q [TILE_ROWS, dim], k [dim, TILE_KEYS], s rows of PAGE.
void tile(const float* q, const float* k, int dim, float* s) {
  Vec sum[TILE_ROWS][2] = {};
  for (int d = 0; d < dim; ++d, k += TILE_KEYS) {
    const Vec low = load(k), high = load(k + LANES);
#pragma GCC unroll 12
    for (int r = 0; r < TILE_ROWS; ++r) {
      const Vec x = set(q[r * int64_t(dim) + d]);
      sum[r][0] = fma(x, low, sum[r][0]);
      sum[r][1] = fma(x, high, sum[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < TILE_ROWS; ++r) {
    store(s + r * PAGE, sum[r][0]);
    store(s + r * PAGE + LANES, sum[r][1]);
  }
}

// A block of scores [count * group, PAGE] in base 2, of queries from `query` on and the page of keys from `key` on;
// hidden ones are -inf.
struct Block {
  int64_t query, count, key;
  const float* s;
};

// Call each(block) for all scores of queries q_first .. q_last-1 with keys first .. last-1 that are not hidden wholly.
template <class F>
void for_blocks(const Dense& dense, int64_t q_first, int64_t q_last, int64_t first, int64_t last, char* at, F&& each) {
  const Scratch scratch(at, dense);
  const int64_t past = dense.keys - dense.queries, step = queries_at_once(dense);
  last = last < past + q_last ? last : past + q_last;
  for (int64_t chunk = first; chunk < last; chunk += MASS_KEYS) {
    const int64_t end = chunk + MASS_KEYS < last ? chunk + MASS_KEYS : last;
    pack_keys(dense, chunk, end - chunk, scratch);
    for (int64_t i = q_first > chunk - past ? q_first : chunk - past; i < q_last; i += step) {
      const int64_t count = step < q_last - i ? step : q_last - i, rows = count * dense.group;
      load_queries(dense, i, count, scratch.q);
      for (int64_t key = chunk; key < end && key < past + i + count; key += PAGE) {
        const float* keys = scratch.keys + (key - chunk) * dense.dim;
        for (int t = 0; t < PAGE; t += TILE_KEYS) {
          for (int64_t r = 0; r < rows; r += TILE_ROWS) {
            tile(scratch.q + r * dense.dim, keys + t * dense.dim, dense.dim, scratch.s + r * PAGE + t);
          }
        }
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t seen = past + i + r / dense.group + 1, n = (seen < last ? seen : last) - key;
          if (dense.softcap > 0) soften(dense.softcap, scratch.s + r * PAGE);
          if (n < PAGE) hide(scratch.s + r * PAGE, int(n), nullptr, 0);
        }
        each(Block{i, count, key, scratch.s});
      }
    }
  }
}

// 2^x that does not hide NaN.
KVSTRATA_INLINE Vec power(Vec x) { return x == x ? exp2(x) : x; }

void lse(const Dense& dense, int64_t q_first, int64_t q_last, int64_t first, int64_t last, float* max, float* sum,
         char* scratch) {
  for (int g = 0; g < dense.group; ++g) {
    for (int64_t i = q_first; i < q_last; ++i) {
      max[g * dense.queries + i] = -__builtin_inff();
      sum[g * dense.queries + i] = 0.0f;
    }
  }
  for_blocks(dense, q_first, q_last, first, last, scratch, [&](const Block& block) {
    for (int64_t r = 0; r < block.count * dense.group; ++r) {
      const int64_t query = block.query + r / dense.group;
      if (block.key > dense.keys - dense.queries + query) continue;  // sees nothing of this page
      const float* s = block.s + r * PAGE;
      float& row_max = max[r % dense.group * dense.queries + query];
      float& row_sum = sum[r % dense.group * dense.queries + query];
      Vec top = load(s);
      for (int t = LANES; t < PAGE; t += LANES) top = maximum(top, load(s + t));
      const float page_max = reduce_max(top);
      if (page_max > row_max) {
        row_sum *= exp2(row_max - page_max);
        row_max = page_max;
      }
      Vec total = set(0.0f);
      for (int t = 0; t < PAGE; t += LANES) total = total + power(load(s + t) - set(row_max));
      row_sum += reduce_add(total);
    }
  });
}

void mass(const Dense& dense, const float* lse, const MassRule& rule, int64_t first, int64_t last, float* mass,
          char* scratch) {
  alignas(64) float total[MASS_KEYS] = {};
  const float share = 1.0f / float(dense.group);
  for_blocks(dense, 0, dense.queries, first, last, scratch, [&](const Block& block) {
    float* to = total + (block.key - first);
    for (int t = 0; t < PAGE; t += LANES) {
      Vec column = load(to + t);
      const float* s = block.s + t;
      for (int64_t i = block.query; i < block.query + block.count; ++i) {
        Vec p = set(0.0f);
        for (int g = 0; g < dense.group; ++g, s += PAGE) {
          p = p + power(load(s) - set(lse[g * dense.queries + i] * LOG2_E));
        }
        if (rule.counts) {
          const Vec mean_times_seen = p * set(share) * set(float(dense.keys - dense.queries + i + 1));
          p = mean_times_seen > set(1.0f) ? set(float(dense.group)) : set(0.0f);
        }
        column = fma(set(rule.weights[i]), p, column);
      }
      store(to + t, column);
    }
  });
  for (int64_t key = first; key < last; ++key) mass[key] = total[key - first] * share;
}

}  // namespace

const MassKernels MASS_KERNELS = {scratch_bytes, lse, mass};

}  // namespace kvstrata::KVSTRATA_ISA
