// One call of `attend`, checked and resolved: what the plan works from without Python.
#pragma once

#include <vector>

#include "arena.h"
#include "arrays.h"

namespace kvstrata {

struct Call {
  int64_t batch, heads, group, queries;  // B, H, G, Q
  int k_dim, v_dim;
  DType dtype;
  Array q, out;
  float scale, softcap;
  const float* sinks;           // [H * G] or null
  std::vector<float> weights;   // of queries by age
  bool counts;
  float* mass;                  // [B, H, width] or null
  int64_t width;                // N of mass and positions
  std::vector<int64_t> offsets;
  float* lse;                   // [B, H * G, Q] or null
  const int32_t* positions;     // [B, position_heads, width] or null
  int64_t position_heads;
  int window;
  int threads;
  std::vector<int32_t> tokens;  // [B]
  std::vector<Resolved> tiers;  // new entries counted

  int64_t segments() const { return batch * heads; }
  const int32_t* positions_of(int64_t segment) const {
    if (!positions) return nullptr;
    const int64_t row = position_heads == 1 ? segment / heads : segment;
    return positions + row * width;
  }
};

// Compute out, lse and mass. Calls no Python; safe from several threads.
void run(const Call& call);

}  // namespace kvstrata
