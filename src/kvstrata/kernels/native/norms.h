// Norms of products, as kernels/norms/ref.py words them. Nothing here knows Python.
#pragma once

#include "kernels.h"

namespace kvstrata {

// Values of one key-value head, and the matrices of the query heads that share it.
struct Norms {
  DType dtype;
  int dim, group;
  const char* v;         // [dim] rows, dense
  int64_t row_bytes;     // from one to the next
  const float* outputs;  // [group, dim, dim]: row d has what channel d adds to each of the outputs
};

struct NormKernels {
  int64_t (*scratch_bytes)(const Norms& norms);  // 64-byte aligned
  // Of values first .. last-1, to to[g * stride + first ..].
  void (*norms)(const Norms& norms, int64_t first, int64_t last, float* to, int64_t stride, char* scratch);
};

constexpr int64_t NORM_VALUES = 192;  // of an item

}  // namespace kvstrata
