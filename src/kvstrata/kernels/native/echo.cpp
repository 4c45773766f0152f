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

void echo(nb::handle q, nb::handle k, nb::handle sinks, nb::handle lse, nb::handle less, nb::handle cos, nb::handle sin,
          nb::handle best_out, double scale, bool neighbours, int64_t first, int64_t low, int64_t high, int64_t before,
          int64_t skip, double softcap, int threads) {
  const DenseInputs in(q, k, scale, softcap, threads);
  const int64_t queries = in.first.queries, keys = in.first.keys, group = in.first.group, dim = in.first.dim;
  const Array given = view(lse, "lse"), off = view(less, "less"), out = view(best_out, "best_out");
  const Array sink = view(sinks, "sinks"), even = view(cos, "cos"), odd = view(sin, "sin");
  expect(sink, "sinks", in.q.scalar, {in.batch, in.heads, -1, dim});
  expect_dense_rows(sink, "sinks");
  if (sink.shape[2] > ECHO_SINKS) fail("sinks must be at most " + std::to_string(ECHO_SINKS));
  expect(even, "cos", Scalar::f32, {-1});
  expect_contiguous(even, "cos");
  expect(odd, "sin", Scalar::f32, {even.shape[0]});
  expect_contiguous(odd, "sin");
  if (2 * even.shape[0] > dim) fail("cos " + even.describe() + " is for more channels than keys have");
  expect(given, "lse", Scalar::f32, {in.batch, in.q.shape[1], queries});
  expect_contiguous(given, "lse");
  expect(off, "less", Scalar::f32, {in.batch, in.heads, queries});
  expect_contiguous(off, "less");
  expect(out, "best_out", Scalar::f32, {in.batch, in.q.shape[1], keys});
  expect_contiguous(out, "best_out");
  if (low > high || high - low >= ECHO_WIDTH || std::abs(low) > keys + queries + ECHO_WIDTH) {
    fail("low to high must be 1 to " + std::to_string(ECHO_WIDTH) + " offsets within the keys");
  }
  if (first < 0) fail("first must be a position");
  if (before < 0 || before > keys || skip < 0 || skip > keys) fail("before and skip must be 0 to the number of keys");
  const EchoKernels& kernels = *isa().echo;
  nb::gil_scoped_release without_gil;

  const auto of = [&](int64_t segment) {
    const int64_t row = segment / in.heads, head = segment % in.heads;
    return Echo{in.at(segment),
                sink.data + (row * sink.stride[0] + head * sink.stride[1]) * sink.item,
                sink.stride[2] * sink.item,
                int(sink.shape[2]),
                given.as<float>() + segment * group * queries,
                off.as<float>() + segment * queries,
                even.as<float>(),
                odd.as<float>(),
                int(even.shape[0]),
                neighbours,
                first,
                before,
                int(low),
                int(high - low + 1),
                skip};
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
  m.def("echo", &echo, "q"_a, "k"_a, "sinks"_a, "lse"_a, "less"_a, "cos"_a, "sin"_a, "best_out"_a, "scale"_a,
        nb::kw_only(), "neighbours"_a, "first"_a, "low"_a, "high"_a, "before"_a, "skip"_a = 0, "softcap"_a = 0.0,
        "threads"_a = 1,
        "The largest log-probability that R queries q [B, H*G, R, D] of positions `first` on give each of the keys k "
        "[B, H, S, D], turned by cos and sin [R/2], at offsets low .. high from their own, beside lse [B, H*G, R] and "
        "the sinks [B, H, s, D]; less [B, H, R] taken off; to best_out [B, H*G, S].");
}

}  // namespace kvstrata
