// column_lse and column_mass, for Python.
#include "mass.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "arrays.h"
#include "bindings.h"
#include "dense.h"
#include "dispatch.h"
#include "pool.h"
#include "thread_scratch.h"

namespace kvstrata {

namespace {

constexpr int64_t LSE_ROWS = 256;  // queries x group of one item: packing the keys again for each then costs little
constexpr int64_t FEW_ITEMS = 64, LEAST_RANGE = 1024, MOST_RANGES = 8;
constexpr double LOG2_E = 1.4426950408889634;

int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Natural log-sum-exp of the parts [ranges, n] of each row and of the sink of its head, or of the parts alone.
void merge(const std::vector<float>& max, const std::vector<float>& sum, int64_t n, const DenseInputs& in,
           const float* sinks, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const double sink = sinks ? LOG2_E * sinks[i / in.first.queries % in.q.shape[1]] : -INFINITY;
    double top = sink;
    for (size_t place = i; place < max.size(); place += n) top = std::fmax(top, max[place]);
    double total = sinks ? std::exp2(sink - top) : 0;
    for (size_t place = i; place < max.size(); place += n) {
      if (sum[place] != 0) total += sum[place] * std::exp2(max[place] - top);
    }
    out[i] = float((top + std::log2(total)) / LOG2_E);
  }
}

void column_lse(nb::handle q, nb::handle k, nb::handle lse_out, double scale, double softcap, nb::handle sinks,
                int threads) {
  const DenseInputs in(q, k, scale, softcap, threads);
  in.expect_causal();
  const Array out = view(lse_out, "lse_out");
  expect(out, "lse_out", Scalar::f32, {in.batch, in.q.shape[1], in.first.queries});
  expect_contiguous(out, "lse_out");
  const float* sink = nullptr;
  if (!sinks.is_none()) {
    const Array array = view(sinks, "sinks");
    expect(array, "sinks", Scalar::f32, {in.q.shape[1]});
    expect_contiguous(array, "sinks");
    sink = array.as<float>();
  }
  const MassKernels& kernels = *isa().mass;
  nb::gil_scoped_release without_gil;

  const int64_t segments = in.batch * in.heads, queries = in.first.queries, keys = in.first.keys;
  const int64_t step = std::max<int64_t>(1, LSE_ROWS / in.first.group), blocks = parts(queries, step);
  // Where there are few items, ranges of keys are items too: by shapes alone, so that threads change no result.
  const int64_t ranges = segments * blocks < FEW_ITEMS ? std::min(MOST_RANGES, parts(keys, LEAST_RANGE)) : 1;
  const int64_t width = round_up(parts(keys, ranges), PAGE), items = segments * blocks * ranges;
  const int64_t rows = queries * in.first.group;
  std::vector<float> max(ranges * segments * rows), sum(max.size());
  const ThreadScratch scratch(kernels.scratch_bytes(in.first), std::min<int64_t>(threads, items));
  parallel(threads, items, [&](int64_t item, int thread) {
    const int64_t range = item % ranges, segment = item / ranges % segments;
    const int64_t block = blocks - 1 - item / ranges / segments;  // those that see most begin
    const int64_t start = std::min(range * width, keys), place = (range * segments + segment) * rows;
    kernels.lse(in.at(segment), block * step, std::min(queries, (block + 1) * step), start,
                std::min(keys, start + width), &max[place], &sum[place], scratch.of(thread));
  });
  merge(max, sum, segments * rows, in, sink, out.as<float>());
}

void column_mass(nb::handle q, nb::handle k, nb::handle lse, nb::handle mass_out, double scale, double softcap,
                 double decay, bool counts, int threads) {
  const DenseInputs in(q, k, scale, softcap, threads);
  in.expect_causal();
  const int64_t segments = in.batch * in.heads, queries = in.first.queries, keys = in.first.keys;
  const Array given = view(lse, "lse"), out = view(mass_out, "mass_out");
  expect(given, "lse", Scalar::f32, {in.batch, in.q.shape[1], queries});
  expect_contiguous(given, "lse");
  expect(out, "mass_out", Scalar::f32, {in.batch, in.heads, keys});
  expect_contiguous(out, "mass_out");
  if (!std::isfinite(decay)) fail("decay must be finite");
  const MassKernels& kernels = *isa().mass;
  nb::gil_scoped_release without_gil;

  std::vector<float> weights(queries);
  for (int64_t i = 0; i < queries; ++i) weights[i] = float(std::pow(decay, double(queries - 1 - i)));
  if (counts && queries == keys) weights[0] = 0;  // its one key has an even share, whatever rounding makes of that
  const int64_t items = segments * parts(keys, MASS_KEYS);
  const ThreadScratch scratch(kernels.scratch_bytes(in.first), std::min<int64_t>(threads, items));
  parallel(threads, items, [&](int64_t item, int thread) {
    const int64_t segment = item % segments, start = item / segments * MASS_KEYS;  // those that most see begin
    kernels.mass(in.at(segment), given.as<float>() + segment * in.first.group * queries, {weights.data(), counts},
                 start, std::min(keys, start + MASS_KEYS), out.as<float>() + segment * keys, scratch.of(thread));
  });
}

}  // namespace

void bind_mass(nb::module_& m) {
  using namespace nb::literals;
  m.def("column_lse", &column_lse, "q"_a, "k"_a, "lse_out"_a, "scale"_a, nb::kw_only(), "softcap"_a = 0.0,
        "sinks"_a.none() = nb::none(), "threads"_a = 1,
        "Log-sum-exp of the last R queries q [B, H*G, R, D] of keys k [B, H, N, D] to lse_out [B, H*G, R].");
  m.def("column_mass", &column_mass, "q"_a, "k"_a, "lse"_a, "mass_out"_a, "scale"_a, nb::kw_only(), "softcap"_a = 0.0,
        "decay"_a = 1.0, "counts"_a = false, "threads"_a = 1,
        "What all R queries give each key, of lse [B, H*G, R], to mass_out [B, H, N].");
}

}  // namespace kvstrata
