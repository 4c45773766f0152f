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

// What stands beside queries and keys, checked against them.
struct Beside {
  Array sinks, lse, less, cos, sin, best;

  void expect_fits(const DenseInputs& in) const {
    const int64_t queries = in.first.queries, dim = in.first.dim;
    expect(sinks, "sinks", in.q.scalar, {in.batch, in.heads, -1, dim});
    expect_dense_rows(sinks, "sinks");
    if (sinks.shape[2] > ECHO_SINKS) fail("sinks must be at most " + std::to_string(ECHO_SINKS));
    expect(lse, "lse", Scalar::f32, {in.batch, in.q.shape[1], queries});
    expect(less, "less", Scalar::f32, {in.batch, in.heads, queries});
    expect(cos, "cos", Scalar::f32, {-1});
    expect(sin, "sin", Scalar::f32, {cos.shape[0]});
    if (2 * cos.shape[0] > dim) fail("cos " + cos.describe() + " is for more channels than keys have");
    expect(best, "best_out", Scalar::f32, {in.batch, in.q.shape[1], in.first.keys});
    expect_contiguous(lse, "lse");
    expect_contiguous(less, "less");
    expect_contiguous(cos, "cos");
    expect_contiguous(sin, "sin");
    expect_contiguous(best, "best_out");
  }
};

void echo(nb::handle q, nb::handle k, nb::handle sinks, nb::handle lse, nb::handle less, nb::handle cos, nb::handle sin,
          nb::handle best_out, double scale, bool neighbours, int64_t first, int64_t low, int64_t high, int64_t before,
          int64_t skip, double softcap, int threads) {
  const DenseInputs in(q, k, scale, softcap, threads);
  const Beside beside{view(sinks, "sinks"), view(lse, "lse"), view(less, "less"),
                      view(cos, "cos"),     view(sin, "sin"), view(best_out, "best_out")};
  beside.expect_fits(in);
  const int64_t queries = in.first.queries, keys = in.first.keys, group = in.first.group;
  if (low > high || high - low >= ECHO_WIDTH || std::abs(low) > keys + queries + ECHO_WIDTH) {
    fail("low to high must be 1 to " + std::to_string(ECHO_WIDTH) + " offsets within the keys");
  }
  if (first < 0 || first > int64_t(1) << 31) fail("first must be a position");
  if (before < 0 || before > keys || skip < 0 || skip > keys) fail("before and skip must be 0 to the number of keys");
  const EchoKernels& kernels = *isa().echo;
  nb::gil_scoped_release without_gil;

  const auto of = [&](int64_t segment) {
    const Array& sink = beside.sinks;
    const int64_t row = segment / in.heads, head = segment % in.heads;
    return Echo{in.at(segment),
                sink.data + (row * sink.stride[0] + head * sink.stride[1]) * sink.item,
                sink.stride[2] * sink.item,
                int(sink.shape[2]),
                beside.lse.as<float>() + segment * group * queries,
                beside.less.as<float>() + segment * queries,
                beside.cos.as<float>(),
                beside.sin.as<float>(),
                int(beside.cos.shape[0]),
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
    kernels.echo(of(segment), start, std::min(keys, start + ECHO_KEYS), beside.best.as<float>() + segment * group * keys,
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
