// What each instruction set offers: plain structs in, plain memory out. Nothing here knows Python or allocates.
#pragma once

#include <cstdint>

#include "format.h"

namespace kvstrata {

constexpr int MAX_ROWS = 256;  // queries x group that one item may hold
constexpr int MAX_TIERS = 8;

// The entries of one tier in one segment.
struct Entries {
  Format format;
  const Page* pages;         // ceil(length / PAGE)
  int64_t length;
  const int32_t* positions;  // [length], or null without a window

  int64_t page_count() const { return (length + PAGE - 1) / PAGE; }
};

// Some queries of one key-value head over a range of its pages, counted through all tiers.
//
// Row r is query r / group, oldest first, and head r % group. Scores are kept in base 2: softmax is the same for
// q . k * log2(e), and exp2 is the cheaper exponential.
struct Item {
  const Entries* tiers;
  int tier_count;
  int64_t first, last;
  int rows, group;
  int oldest_age;             // of row 0's query; the newest query of all has age 0 and sees everything
  const float* q;             // [rows, k_dim], the scale multiplied in
  float softcap;              // 0: none; else a score is softcap * tanh(q . k)
  const int32_t* after;       // [queries] a query sees positions > after[query]; null: all
  float* acc;                 // out: [rows, acc_stride], sum of p * v
  int64_t acc_stride;         // a multiple of ACC_ALIGN, at least v_dim
  float* max;                 // out: [rows], the score that p was taken relative to
  float* sum;                 // out: [rows], sum of p
  float* p;                   // out: [last - first, rows, PAGE], or null
  float* p_max;               // out: [last - first, rows], what `max` was when a page's p was written; null as p
  char* scratch;              // scratch_bytes(), 64-byte aligned
};

constexpr int ACC_ALIGN = 32;  // channels: two vectors of the widest set

// One page of probabilities added up over rows.
struct MassPage {
  const float* p;        // [rows, PAGE]
  const float* p_max;    // [rows]
  const float* lse;      // [rows], base 2, in memory of MAX_ROWS
  const float* weights;  // [rows / group], 0 where a query does not count
  const float* seen;     // [rows / group]: compare mean * seen > 1 instead of summing; null: sum
  int rows, group, n;    // entries of the page
  float* out;            // [n], added to
};

struct Kernels {
  int64_t (*scratch_bytes)(int rows, int k_dim, int v_dim);
  void (*attend)(const Item& item);
  void (*mass)(const MassPage& page);
  // n numbers times factor, from and to the dtype of the cache
  void (*load)(const char* from, DType dtype, int64_t n, float factor, float* to);
  void (*store)(const float* from, float factor, int64_t n, DType dtype, char* to);
  uint64_t (*read)(const char* from, int64_t bytes);  // sum of its 8-byte words and last bytes
};

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace kvstrata
