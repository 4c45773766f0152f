// Memory that the pages of one item pass through, some at a time.
#pragma once

#include "coded.h"
#include "kernels.h"
#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

// A row of multipliers: number = step * multiplier, and what does not depend on codes.
struct Step {
  float step, bias;
};

constexpr int PAGES_AT_ONCE = 4;

// Pages whose scores are ready before any of them is softened: the chains of one then hide those of another. Many rows
// are work enough, and would fill the caches.
constexpr int pages_at_once(int rows) { return rows <= 32 ? PAGES_AT_ONCE : 1; }

// What one item works with, laid out in its scratch.
struct Scratch {
  int64_t q_stride;
  float* q_exact;     // [rows, q_stride], as loads of exact pages order it
  float* q;           // [rows, q_stride], in order
  float* s;           // [pages, rows, PAGE], where p is not kept
  float* grid;        // [pages, grid_stride]
  int64_t grid_stride;
  float* decoded;     // keys or values of one page
  char* multipliers;  // [rows, q_stride or PAGE] of 16 bits
  Step* steps;        // [rows]
  int64_t bytes;

  Scratch(char* at, int rows, int k_dim, int v_dim) {
    const char* begin = at;
    const auto take = [&](int64_t size) {
      char* part = at;
      at += round_up(size, 64);
      return part;
    };
    Format finest{DType::f32, true};
    finest.window = 8;
    finest.k_dim = k_dim;
    finest.v_dim = v_dim;
    q_stride = round_up(k_dim, BLOCK);
    q_exact = reinterpret_cast<float*>(take(rows * q_stride * 4));
    q = reinterpret_cast<float*>(take(rows * q_stride * 4));
    const int pages = pages_at_once(rows);
    s = reinterpret_cast<float*>(take(pages * rows * PAGE * 4));
    grid_stride = Grid::numbers(finest);
    grid = reinterpret_cast<float*>(take(pages * grid_stride * 4));
    decoded = reinterpret_cast<float*>(take(int64_t(PAGE) * (k_dim > v_dim ? k_dim : v_dim) * 4));
    multipliers = take(rows * (q_stride > PAGE ? q_stride : PAGE) * 2);
    steps = reinterpret_cast<Step*>(take(rows * sizeof(Step)));
    bytes = at - begin;
  }
};

}  // namespace kvstrata::KVSTRATA_ISA
