// Whole pages from numbers to codes with a grid, and back, bit for bit as kernels/codec/ref.py. Knows no Python.
#pragma once

#include "kernels.h"

namespace kvstrata {

// The 64 rows of a page in the dtype of the cache, or in fp32; `stride` in bytes.
struct Rows {
  char* at;
  int64_t stride;
};

struct CodecKernels {
  int64_t (*scratch_bytes)(const Format& format);  // of either call, 64-byte aligned
  // Returns how many of the numbers are infinite or NaN.
  int64_t (*pack)(const Format& format, Rows k, Rows v, const Page& to, char* scratch);
  void (*unpack)(const Format& format, const Page& from, Rows k, Rows v, char* scratch);  // to fp32
};

}  // namespace kvstrata
