// attend(): its arguments checked, everything resolved before any thread starts.
#include "attend.h"

#include <nanobind/stl/vector.h>

#include <cmath>
#include <limits>

#include "bindings.h"
#include "entries.h"
#include "kernels.h"
#include "pool.h"

namespace kvstrata {
namespace {

// Everything of the call that may be left out.
struct Options {
  nb::object new_k, new_v, tokens, sinks, mass, lse, positions;
  std::vector<float> weights;
  std::vector<int64_t> offsets;
  double softcap;
  int window, threads;
  bool counts;
};

void check_tiers(const std::vector<Pages*>& tiers) {
  if (tiers.empty() || tiers.size() > MAX_TIERS) fail("tiers must be 1 to " + std::to_string(MAX_TIERS));
  for (const Pages* tier : tiers) {
    if (!tier) throw nb::type_error("tiers must hold Pages, not None");
    const Format &f = tier->format(), &own = tiers[0]->format();
    if (f.dtype != own.dtype || f.k_dim != own.k_dim || f.v_dim != own.v_dim) {
      fail("all tiers must have one dtype, k_dim and v_dim");
    }
    if (tier->segments() != tiers[0]->segments()) fail("all tiers must have equally many segments");
  }
  if (tiers[0]->format().coded) fail("tiers[0] must be exact: it holds the queries' own entries");
}

// Shapes that follow from new_k, positions or mass where there are any: q alone does not tell H from G.
void set_shapes(Call& call, nb::handle q, nb::handle out, const Pages& own) {
  const Format& f = own.format();
  call.dtype = f.dtype;
  call.k_dim = f.k_dim;
  call.v_dim = f.v_dim;
  call.q = view(q, "q");
  call.out = view(out, "out");
  const Scalar scalar = scalar_of(f.dtype);
  expect(call.q, "q", scalar, {-1, -1, -1, f.k_dim});
  expect(call.out, "out", scalar, {call.q.shape[0], call.q.shape[1], call.q.shape[2], f.v_dim});
  expect_dense_rows(call.q, "q");
  expect_dense_rows(call.out, "out");
  call.batch = call.q.shape[0];
  call.queries = call.q.shape[2];
  const int64_t segments = own.segments();
  if (call.q.size() == 0) fail("q is empty");
  if (segments % call.batch) {
    fail("the pages have " + std::to_string(segments) + " segments, which is no multiple of the rows of q " +
         call.q.describe());
  }
  call.heads = segments / call.batch;
  if (call.q.shape[1] % call.heads) {
    fail("q has " + std::to_string(call.q.shape[1]) + " heads, which is no multiple of the " +
         std::to_string(call.heads) + " key-value heads of the pages");
  }
  call.group = call.q.shape[1] / call.heads;
  if (call.group > MAX_ROWS) fail("more than " + std::to_string(MAX_ROWS) + " query heads share a key-value head");
}

// The places of the tiers' entries in mass and positions must lie inside and apart, in every segment.
void check_offsets(const Call& call) {
  if (call.offsets.size() != call.tiers.size()) fail("offsets must have one number for each of the tiers");
  for (size_t i = 0; i < call.tiers.size(); ++i) {
    const int64_t begin = call.offsets[i];
    if (begin < 0 || begin > call.width) fail("offsets must lie in mass and positions");
    for (int64_t s = 0; s < call.segments(); ++s) {
      const int64_t end = begin + call.tiers[i].lengths[s];
      if (end > call.width) {
        fail("mass or positions has " + std::to_string(call.width) + " places, segment " + std::to_string(s) +
             " needs " + std::to_string(end));
      }
      for (size_t j = 0; j < call.tiers.size(); ++j) {
        if (j == i || call.tiers[i].lengths[s] == 0) continue;
        if (call.offsets[j] < end && begin < call.offsets[j] + call.tiers[j].lengths[s]) fail("offsets overlap");
      }
    }
  }
}

void set_places(Call& call, const Options& o) {
  call.width = 0;
  if (!o.mass.is_none()) {
    const Array mass = view(o.mass, "mass");
    expect(mass, "mass", Scalar::f32, {call.batch, call.heads, -1});
    expect_contiguous(mass, "mass");
    call.mass = mass.as<float>();
    call.width = mass.shape[2];
  } else if (!o.weights.empty() || o.counts) {
    fail("weights and counts say how mass is summed, but there is no mass");
  }
  call.window = o.window;
  if (o.window < 0) fail("window is negative");
  if (o.window > 0) {
    if (o.positions.is_none()) fail("a window needs positions");
    const Array positions = view(o.positions, "positions");
    expect(positions, "positions", Scalar::i32, {call.batch, -1, call.mass ? call.width : -1});
    expect_contiguous(positions, "positions");
    call.position_heads = positions.shape[1];
    if (call.position_heads != 1 && call.position_heads != call.heads) fail("positions must have 1 or H heads");
    call.positions = positions.as<int32_t>();
    call.width = positions.shape[2];
    for (int64_t s = 0; s < call.segments(); ++s) {
      if (call.tiers[0].lengths[s] < call.tokens[s / call.heads]) {
        fail("with a window every query's own entry must be in tiers[0], with its position");
      }
    }
  }
  call.offsets = o.offsets;
  if (call.mass || call.positions) check_offsets(call);
}

void set_numbers(Call& call, double scale, const Options& o) {
  call.scale = float(scale);
  call.softcap = float(o.softcap);
  if (!std::isfinite(call.scale)) fail("scale must be finite");
  if (!(call.softcap >= 0) || !std::isfinite(call.softcap)) fail("softcap must be finite and not negative");
  call.weights = o.weights;
  call.counts = o.counts;
  call.threads = o.threads;
  if (o.threads < 1 || o.threads > MAX_THREADS) fail("threads must be 1 to " + std::to_string(MAX_THREADS));
  if (!o.sinks.is_none()) {
    const Array sinks = view(o.sinks, "sinks");
    expect(sinks, "sinks", Scalar::f32, {call.heads * call.group});
    expect_contiguous(sinks, "sinks");
    call.sinks = sinks.as<float>();
  }
  if (!o.lse.is_none()) {
    const Array lse = view(o.lse, "lse");
    expect(lse, "lse", Scalar::f32, {call.batch, call.heads * call.group, call.queries});
    expect_contiguous(lse, "lse");
    call.lse = lse.as<float>();
  }
}

void attend(nb::handle q, const std::vector<Pages*>& tiers, nb::handle out, double scale, const Options& o) {
  check_tiers(tiers);
  Call call{};
  set_shapes(call, q, out, *tiers[0]);
  call.tokens = tokens_of(o.tokens, call.batch, call.queries);
  if (o.new_k.is_none() != o.new_v.is_none()) fail("new_k and new_v come together");
  NewEntries entries;
  std::vector<int32_t> added;
  if (!o.new_k.is_none()) {
    entries = new_entries(o.new_k, o.new_v, tiers[0]->format(), call.segments(), call.heads);
    if (entries.k.shape[0] != call.batch || entries.k.shape[2] != call.queries) {
      fail("new_k must be of the rows and queries of q " + call.q.describe() + ", not " + entries.k.describe());
    }
    added = for_segments(call.tokens, call.heads);
  }
  for (size_t i = 0; i < tiers.size(); ++i) {
    const bool grows = i == 0 && !added.empty();
    call.tiers.push_back(resolve(*tiers[i], grows ? added.data() : nullptr, "tiers"));
  }
  set_numbers(call, scale, o);
  set_places(call, o);
  for (size_t s = 0; s < added.size(); ++s) tiers[0]->lengths()[s] += added[s];  // nothing fails from here on
  nb::gil_scoped_release without_gil;
  if (!added.empty()) write(entries, call.tokens, call.tiers[0]);
  run(call);
}

}  // namespace

void bind_attend(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "attend",
      [](nb::handle q, const std::vector<Pages*>& tiers, nb::handle out, double scale, nb::object new_k,
         nb::object new_v, nb::object tokens, double softcap, nb::object sinks, std::vector<float> weights, bool counts,
         nb::object mass, std::vector<int64_t> offsets, nb::object lse, nb::object positions, int window, int threads) {
        attend(q, tiers, out, scale,
               {std::move(new_k), std::move(new_v), std::move(tokens), std::move(sinks), std::move(mass),
                std::move(lse), std::move(positions), std::move(weights), std::move(offsets), softcap, window, threads,
                counts});
      },
      "q"_a, "tiers"_a, "out"_a, "scale"_a, nb::kw_only(), "new_k"_a.none() = nb::none(),
      "new_v"_a.none() = nb::none(), "tokens"_a.none() = nb::none(), "softcap"_a = 0.0,
      "sinks"_a.none() = nb::none(), "weights"_a = std::vector<float>(), "counts"_a = false,
      "mass"_a.none() = nb::none(), "offsets"_a = std::vector<int64_t>(), "lse"_a.none() = nb::none(),
      "positions"_a.none() = nb::none(), "window"_a = 0, "threads"_a = 1);
}

}  // namespace kvstrata
