// What pages are made of: the words of kvstrata.kernels.pages in C++. Nothing here knows Python.
#pragma once

#include <cstdint>

namespace kvstrata {

constexpr int PAGE = 64;

enum class DType : uint8_t { f32, bf16, f16 };

constexpr int item_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

struct Format {
  DType dtype;  // of the cache
  bool coded;
  int k_bits = 0, v_bits = 0;  // 8, 4 or 2
  bool symmetric = false;      // grids of a page's channels, fp32; else of keys by channel and window, values by token
  int window = PAGE;           // slots that share a key grid
  int k_dim = 0, v_dim = 0;

  int64_t k_bytes() const { return int64_t(PAGE) * k_dim * (coded ? k_bits : 8 * item_size(dtype)) / 8; }
  int64_t v_bytes() const { return int64_t(PAGE) * v_dim * (coded ? v_bits : 8 * item_size(dtype)) / 8; }
  DType grid_dtype() const { return symmetric ? DType::f32 : dtype; }
  // Numbers of one page's grid: symmetric k [D], v [Dv]; else k scale [w, D], k zero [w, D], v scale [64], v zero [64].
  int64_t grid_numbers() const {
    if (!coded) return 0;
    return symmetric ? k_dim + v_dim : 2 * int64_t(PAGE / window) * k_dim + 2 * PAGE;
  }
  int64_t grid_bytes() const { return grid_numbers() * item_size(grid_dtype()); }

  bool operator==(const Format& o) const {
    return dtype == o.dtype && coded == o.coded && k_bits == o.k_bits && v_bits == o.v_bits &&
           symmetric == o.symmetric && window == o.window && k_dim == o.k_dim && v_dim == o.v_dim;
  }
};

// Addresses of one page, and how many of its slots hold entries; grid is null for exact pages.
struct Page {
  char* k;
  char* v;
  char* grid;
  int32_t entries;
};

}  // namespace kvstrata
