// Numbers known at run time made template arguments.
#pragma once

#include <type_traits>

#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

constexpr int ROWS_AT_ONCE = 4;

// Call f(first row, integral_constant<rows>) for blocks of up to ROWS_AT_ONCE rows, as even as can be.
template <class F>
KVSTRATA_INLINE void row_blocks(int rows, F&& f) {
  int blocks = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  for (int r = 0; r < rows; --blocks) {
    const int size = (rows - r + blocks - 1) / blocks;
    switch (size) {
      case 1: f(r, std::integral_constant<int, 1>()); break;
      case 2: f(r, std::integral_constant<int, 2>()); break;
      case 3: f(r, std::integral_constant<int, 3>()); break;
      default: f(r, std::integral_constant<int, 4>()); break;
    }
    r += size;
  }
}

template <class F>
KVSTRATA_INLINE void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f32: f(std::integral_constant<DType, DType::f32>()); break;
    case DType::bf16: f(std::integral_constant<DType, DType::bf16>()); break;
    case DType::f16: f(std::integral_constant<DType, DType::f16>()); break;
  }
}

template <class F>
KVSTRATA_INLINE void with_bits(int bits, F&& f) {
  switch (bits) {
    case 8: f(std::integral_constant<int, 8>()); break;
    case 4: f(std::integral_constant<int, 4>()); break;
    default: f(std::integral_constant<int, 2>()); break;
  }
}

}  // namespace kvstrata::KVSTRATA_ISA
