// The banded repeat, as kernels/echo/ref.py words it. Nothing here knows Python.
#pragma once

#include "mass.h"

namespace kvstrata {

// `dense` has the queries and keys of one key-value head, here without causality: query r sees keys
// before + r + low .. before + r + low + width - 1, as far as they are from `skip` on.
struct Echo {
  Dense dense;
  const char* sinks;  // [sink_count, dim], rows dense, of dense.dtype
  int64_t sink_bytes;  // from one to the next
  int sink_count;
  const float* lse;   // [group, queries], natural: what each query saw itself
  const float* less;  // [queries], natural, taken off what each query gives
  const float *cos, *sin;  // [pairs]: how keys are turned
  int pairs;
  bool neighbours;  // pairs are (2i, 2i + 1), or else (i, i + pairs)
  int64_t first;    // position of query 0
  int64_t before;
  int low, width;
  int64_t skip;
};

struct EchoKernels {
  int64_t (*scratch_bytes)(const Echo& echo);  // 64-byte aligned
  // The largest log-probability of keys first .. last-1, at most ECHO_KEYS, to best[g * keys + first ..]; natural.
  void (*echo)(const Echo& echo, int64_t first, int64_t last, float* best, char* scratch);
};

constexpr int64_t ECHO_KEYS = 256;
constexpr int ECHO_WIDTH = 64;  // offsets of the widest band
constexpr int ECHO_SINKS = 64;  // sinks at most

}  // namespace kvstrata
