// Rows of any length and dtype as fp32.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

extern const Kernels KERNELS;

// One row times a factor. Vectors of any width are loaded in steps of eight numbers, so what is over is copied first.
inline void load_row(const char* from, DType dtype, int dim, float factor, float* to) {
  const int whole = dim / 8 * 8, over = dim - whole, item = item_size(dtype);
  KERNELS.load(from, dtype, whole, factor, to);
  if (over == 0) return;
  char rest[8 * sizeof(float)] = {};
  float numbers[8];
  std::memcpy(rest, from + whole * item, over * item);
  KERNELS.load(rest, dtype, 8, factor, numbers);
  std::memcpy(to + whole, numbers, over * sizeof(float));
}

}  // namespace kvstrata::KVSTRATA_ISA
