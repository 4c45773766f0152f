// Attention mass of the last queries of dense keys, causal, as kernels/mass/ref.py words it. Nothing here knows Python.
#pragma once

#include "kernels.h"

namespace kvstrata {

// Queries and keys of one key-value head. Query i of the R last ones sees keys 0 .. keys - R + i.
struct Dense {
  DType dtype;
  int dim, group;
  const char* q;                   // [group, queries, dim], rows dense
  int64_t head_bytes, query_bytes; // from one head of the group, or query, to the next
  int64_t queries;
  const char* k;                   // [keys, dim], rows dense
  int64_t key_bytes;
  int64_t keys;
  float factor;                    // q . k times this is a score, in base 2; or with a softcap what tanh takes
  float softcap;                   // 0: none; else scores are softcap * tanh, in base 2
};

// What becomes of the probabilities of a query: weights[i] * the group's mean, or of whether that times seen exceeds 1.
struct MassRule {
  const float* weights;  // [queries]
  bool counts;
};

struct MassKernels {
  int64_t (*scratch_bytes)(const Dense& dense);  // 64-byte aligned
  // Over keys first .. last-1 the log2-sum-exp2 of queries q_first .. q_last-1, as max [group, queries] and the sum
  // [group, queries] relative to it; -inf and 0 of a query that sees none of the keys.
  void (*lse)(const Dense& dense, int64_t q_first, int64_t q_last, int64_t first, int64_t last, float* max, float* sum,
              char* scratch);
  // Mass of keys first .. last-1, at most MASS_KEYS, to mass[first ..]. lse [group, queries], natural.
  void (*mass)(const Dense& dense, const float* lse, const MassRule& rule, int64_t first, int64_t last, float* mass,
               char* scratch);
};

constexpr int64_t MASS_KEYS = 256;

}  // namespace kvstrata
