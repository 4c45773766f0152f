// Queries and keys as plain tensors, checked.
#pragma once

#include "arrays.h"
#include "mass.h"

namespace kvstrata {

// q [B, H*G, R, D] and k [B, H, N, D] of all rows and heads.
struct DenseInputs {
  Array q, k;
  int64_t batch, heads;
  Dense first;  // of row 0, head 0

  DenseInputs(nb::handle q_object, nb::handle k_object, double scale, double softcap, int threads);

  // Raise ValueError unless the queries can be the last of the keys.
  void expect_causal() const;

  // Of the n-th (row, head) in order.
  Dense at(int64_t n) const;
};

}  // namespace kvstrata
