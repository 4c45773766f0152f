// Norms of products of one instruction set; compiled once for each.
#include "norms.h"

#include <cmath>

#include "rows.h"
#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

extern const NormKernels NORM_KERNELS;

namespace {

// Values and vectors of outputs that are summed at once, as registers allow.
constexpr int ROWS = LANES == 16 ? 6 : 4, WIDE = LANES == 16 ? 4 : 2;

int64_t scratch_bytes(const Norms& norms) { return int64_t(ROWS) * norms.dim * int64_t(sizeof(float)); }

// sum[r] += squares of outputs c .. c + N * LANES - 1 of value r.
template <int N>
void add_squares(const Norms& norms, const float* values, const float* outputs, int c, Vec* sum) {
  Vec out[ROWS][N] = {};
  for (int d = 0; d < norms.dim; ++d) {
    Vec w[N];
    for (int n = 0; n < N; ++n) w[n] = load(outputs + d * norms.dim + c + n * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Vec x = set(values[r * norms.dim + d]);
      for (int n = 0; n < N; ++n) out[r][n] = fma(x, w[n], out[r][n]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int n = 0; n < N; ++n) sum[r] = fma(out[r][n], out[r][n], sum[r]);
  }
}

// The square of output c of one value.
float square(const Norms& norms, const float* value, const float* outputs, int c) {
  float out = 0.0f;
  for (int d = 0; d < norms.dim; ++d) out += value[d] * outputs[d * norms.dim + c];
  return out * out;
}

void norms(const Norms& norms, int64_t first, int64_t last, float* to, int64_t stride, char* scratch) {
  float* values = reinterpret_cast<float*>(scratch);
  for (int64_t at = first; at < last; at += ROWS) {
    const int rows = int(last - at < ROWS ? last - at : ROWS);
    for (int r = 0; r < ROWS; ++r) {  // the last one again where there are no more
      const int64_t row = at + (r < rows ? r : rows - 1);
      load_row(norms.v + row * norms.row_bytes, norms.dtype, norms.dim, 1.0f, values + r * norms.dim);
    }
    for (int g = 0; g < norms.group; ++g) {
      const float* outputs = norms.outputs + int64_t(g) * norms.dim * norms.dim;
      Vec sum[ROWS] = {};
      int c = 0;
      for (; c + WIDE * LANES <= norms.dim; c += WIDE * LANES) add_squares<WIDE>(norms, values, outputs, c, sum);
      for (; c + LANES <= norms.dim; c += LANES) add_squares<1>(norms, values, outputs, c, sum);
      for (int r = 0; r < rows; ++r) {
        float total = reduce_add(sum[r]);
        for (int over = c; over < norms.dim; ++over) total += square(norms, values + r * norms.dim, outputs, over);
        to[g * stride + at + r] = std::sqrt(total);
      }
    }
  }
}

}  // namespace

const NormKernels NORM_KERNELS = {scratch_bytes, norms};

}  // namespace kvstrata::KVSTRATA_ISA
