// The banded repeat, for Python.
#include "echo.h"

#include <algorithm>

#include "bindings.h"
#include "dense.h"
#include "dispatch.h"
#include "pool.h"
#include "thread_scratch.h"

namespace kvstrata {

namespace {

void echo(nb::handle q, nb::handle k, nb::handle base, nb::handle less, nb::handle best_out, double scale, int64_t low,
          int64_t high, int64_t before, int64_t skip, double softcap, int threads) {
  const DenseInputs in(q, k, scale, softcap, threads);
  const int64_t queries = in.first.queries, keys = in.first.keys, group = in.first.group;
  const Array given = view(base, "base"), off = view(less, "less"), out = view(best_out, "best_out");
  expect(given, "base", Scalar::f32, {in.batch, in.q.shape[1], queries});
  expect_contiguous(given, "base");
  expect(off, "less", Scalar::f32, {in.batch, in.heads, queries});
  expect_contiguous(off, "less");
  expect(out, "best_out", Scalar::f32, {in.batch, in.q.shape[1], keys});
  expect_contiguous(out, "best_out");
  if (low > high || high - low >= ECHO_WIDTH || std::abs(low) > keys + queries + ECHO_WIDTH) {
    fail("low to high must be 1 to " + std::to_string(ECHO_WIDTH) + " offsets within the keys");
  }
  if (before < 0 || before > keys || skip < 0 || skip > keys) fail("before and skip must be 0 to the number of keys");
  const EchoKernels& kernels = *isa().echo;
  nb::gil_scoped_release without_gil;

  const auto of = [&](int64_t segment) {
    const float* rest = given.as<float>() + segment * group * queries;
    const float* taken = off.as<float>() + segment * queries;
    return Echo{in.at(segment), rest, taken, before, int(low), int(high - low + 1), skip};
  };
  const int64_t segments = in.batch * in.heads, items = segments * ((keys + ECHO_KEYS - 1) / ECHO_KEYS);
  const ThreadScratch scratch(kernels.scratch_bytes(of(0)), std::min<int64_t>(threads, items));
  parallel(threads, items, [&](int64_t item, int thread) {
    const int64_t segment = item % segments, start = item / segments * ECHO_KEYS;
    kernels.echo(of(segment), start, std::min(keys, start + ECHO_KEYS), out.as<float>() + segment * group * keys,
                 scratch.of(thread));
  });
}

}  // namespace

void bind_echo(nb::module_& m) {
  using namespace nb::literals;
  m.def("echo", &echo, "q"_a, "k"_a, "base"_a, "less"_a, "best_out"_a, "scale"_a, nb::kw_only(), "low"_a, "high"_a,
        "before"_a, "skip"_a = 0, "softcap"_a = 0.0, "threads"_a = 1,
        "The largest log-probability that R queries q [B, H*G, R, D], beside base [B, H*G, R], give each of the keys "
        "k [B, H, S, D] at offsets low .. high from their own, less [B, H, R] taken off, to best_out [B, H*G, S].");
}

}  // namespace kvstrata
