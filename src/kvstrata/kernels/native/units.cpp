// Coded entries moved from slot to slot with their grids, and exact ones coded under a grid that grows, for Python.
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "arena.h"
#include "bindings.h"
#include "dispatch.h"

namespace kvstrata {
namespace {

constexpr float TOP = 127.0f, GROWTH = 1.1f;  // of codes of 8 bits; of a grid that an entry exceeds

// The pages of every segment, as a table of their own: int32 [S, P], -1 where a segment has none.
struct Table {
  const Arena& arena;
  Array pages;
  mutable size_t hint = 0;

  Table(const Arena& arena, nb::handle table) : arena(arena), pages(view(table, "table")) {
    expect(pages, "table", Scalar::i32, {-1, -1});
    expect_contiguous(pages, "table");
  }

  int64_t segments() const { return pages.shape[0]; }
  int64_t slots() const { return pages.shape[1] * PAGE; }
  int32_t number(int64_t segment, int64_t page) const { return pages.as<int32_t>()[segment * pages.shape[1] + page]; }

  // The page of a slot; ValueError where there is none.
  Page of(int64_t segment, int64_t slot) const {
    if (segment < 0 || segment >= segments()) fail("moves name segment " + std::to_string(segment));
    if (slot < 0 || slot >= slots() || number(segment, slot / PAGE) < 0) {
      fail("segment " + std::to_string(segment) + " has no slot " + std::to_string(slot));
    }
    return arena.find(number(segment, slot / PAGE), hint);
  }
};

// One column of moves int32 [M, 3].
const int32_t* moves_of(const Array& moves, int64_t i) { return moves.as<int32_t>() + 3 * i; }

Array moves_array(nb::handle object) {
  const Array moves = view(object, "moves");
  expect(moves, "moves", Scalar::i32, {-1, 3});
  expect_contiguous(moves, "moves");
  return moves;
}

// Where the codes of one slot lie: keys [D/4/n][64][4] and values [16/n][Dv][4], n = 8 / bits to a byte.
struct Layout {
  Format f;
  int k_groups, per_byte, mask;  // of values

  explicit Layout(const Format& f)
      : f(f), k_groups(f.k_dim * f.k_bits / 32), per_byte(8 / f.v_bits), mask((1 << f.v_bits) - 1) {}

  int64_t slot_bytes() const { return int64_t(k_groups) * 4 + f.v_dim; }

  void read(const Page& page, int slot, char* to) const {
    for (int g = 0; g < k_groups; ++g) std::memcpy(to + g * 4, page.k + (int64_t(g) * PAGE + slot) * 4, 4);
    const char* from = page.v + int64_t(slot / 4 / per_byte) * f.v_dim * 4 + slot % 4;
    const int shift = slot / 4 % per_byte * f.v_bits;
    for (int d = 0; d < f.v_dim; ++d) to[k_groups * 4 + d] = char(uint8_t(from[d * 4]) >> shift & mask);
  }

  void write(const Page& page, int slot, const char* from) const {
    for (int g = 0; g < k_groups; ++g) std::memcpy(page.k + (int64_t(g) * PAGE + slot) * 4, from + g * 4, 4);
    char* to = page.v + int64_t(slot / 4 / per_byte) * f.v_dim * 4 + slot % 4;
    const int shift = slot / 4 % per_byte * f.v_bits;
    for (int d = 0; d < f.v_dim; ++d) {
      const uint8_t others = uint8_t(to[d * 4]) & ~(mask << shift);
      to[d * 4] = char(others | uint8_t(from[k_groups * 4 + d]) << shift);
    }
  }
};

// The parts of a page's grid that belong to a window alone: offset and size in bytes, four of them.
struct WindowGrid {
  int64_t at[4], size[4];

  WindowGrid(const Format& f, int slot) {
    const int64_t item = item_size(f.grid_dtype()), keys = int64_t(PAGE / f.window) * f.k_dim * item;
    const int64_t row = int64_t(slot / f.window) * f.k_dim * item;
    at[0] = row, at[1] = keys + row;
    at[2] = 2 * keys + slot * item, at[3] = at[2] + PAGE * item;
    size[0] = size[1] = f.k_dim * item;
    size[2] = size[3] = f.window * item;
  }
};

// Moves units: (segment, slot it was, slot it shall be). Slots beyond the table are those of the fresh pages, in turn.
void move_units(Arena* arena, nb::handle table, nb::handle moves, int unit, nb::handle fresh_k, nb::handle fresh_v,
                nb::handle fresh_grid) {
  const Format f = arena->format();
  if (!f.coded) fail("units move between coded pages");
  if (unit != f.window && !(f.symmetric && unit == 1)) fail("unit must be what shares a grid: " + std::to_string(f.window));
  const Table to(*arena, table);
  const Array list = moves_array(moves), k = view(fresh_k, "fresh_k"), v = view(fresh_v, "fresh_v");
  const Array grid = view(fresh_grid, "fresh_grid");
  const int64_t fresh = k.shape[0];
  expect(k, "fresh_k", Scalar::u8, {-1, f.k_bytes()});
  expect(v, "fresh_v", Scalar::u8, {fresh, f.v_bytes()});
  expect(grid, "fresh_grid", scalar_of(f.grid_dtype()), {fresh, f.grid_numbers()});
  for (const Array* a : {&k, &v, &grid}) expect_contiguous(*a, "fresh pages");
  std::vector<Page> from, target;
  for (int64_t i = 0; i < list.shape[0]; ++i) {
    const int32_t* m = moves_of(list, i);
    if (m[1] % unit || m[2] % unit || m[1] < 0) fail("moves must name the first slot of a unit");
    target.push_back(to.of(m[0], m[2]));
    if (m[1] < to.slots()) {
      from.push_back(to.of(m[0], m[1]));
      continue;
    }
    const int64_t page = (m[1] - to.slots()) / PAGE;
    if (page >= fresh) fail("moves name fresh page " + std::to_string(page) + " of " + std::to_string(fresh));
    from.push_back({k.data + page * f.k_bytes(), v.data + page * f.v_bytes(), grid.data + page * f.grid_bytes(), PAGE});
  }
  const auto held = arena->hold();
  nb::gil_scoped_release without_gil;
  const Layout layout(f);
  const int64_t codes = unit * layout.slot_bytes(), each = codes + f.grid_bytes();
  std::vector<char> scratch(size_t(list.shape[0] * each));  // all are read before any is written
  for (int64_t i = 0; i < list.shape[0]; ++i) {
    char* at = scratch.data() + i * each;
    const int slot = moves_of(list, i)[1] % PAGE;
    for (int u = 0; u < unit; ++u) layout.read(from[i], slot + u, at + u * layout.slot_bytes());
    if (f.symmetric) {
      std::memcpy(at + codes, from[i].grid, f.grid_bytes());
      continue;
    }
    const WindowGrid part(f, slot);
    at += codes;
    for (int p = 0; p < 4; at += part.size[p], ++p) std::memcpy(at, from[i].grid + part.at[p], part.size[p]);
  }
  for (int64_t i = 0; i < list.shape[0]; ++i) {
    const char* at = scratch.data() + i * each;
    const int slot = moves_of(list, i)[2] % PAGE;
    for (int u = 0; u < unit; ++u) layout.write(target[i], slot + u, at + u * layout.slot_bytes());
    if (f.symmetric) {
      std::memcpy(target[i].grid, at + codes, f.grid_bytes());
      continue;
    }
    const WindowGrid part(f, slot);
    at += codes;
    for (int p = 0; p < 4; at += part.size[p], ++p) std::memcpy(target[i].grid + part.at[p], at, part.size[p]);
  }
}

int code_of(float x, float scale) {
  if (std::isnan(x)) return 0;
  return int(std::min(TOP, std::max(-TOP, std::nearbyint(x / scale))));
}

// A segment's entries to be coded: their numbers [n][k_dim + v_dim], and where they go.
struct Coming {
  std::vector<float> numbers;
  std::vector<Page> pages;
  std::vector<int> slots;
};

// Rounds all codes of a page to a larger grid.
void rescale(const Format& f, const Page& page, const float* old, const float* now) {
  for (int d = 0; d < f.k_dim; ++d) {
    char* at = page.k + int64_t(d / 4) * PAGE * 4 + d % 4;
    for (int t = 0; t < PAGE; ++t) {
      at[t * 4] = char(code_of(float(int(uint8_t(at[t * 4])) - 128) * old[d], now[d]) + 128);
    }
  }
  for (int d = 0; d < f.v_dim; ++d) {
    const float was = old[f.k_dim + d], is = now[f.k_dim + d];
    for (int t = 0; t < PAGE; ++t) {
      char* at = page.v + int64_t(t / 4) * f.v_dim * 4 + d * 4 + t % 4;
      *at = char(code_of(float(int8_t(*at)) * was, is));
    }
  }
}

// Codes exact entries (segment, slot there, slot here) under the frames f32 [S, k_dim + v_dim] of their segments,
// which grow where an entry exceeds them and are NaN where there is none yet. -> (grown, numbers not finite)
std::pair<int64_t, int64_t> code_units(Arena* arena, Pages* exact, nb::handle table, nb::handle moves,
                                       nb::handle frames) {
  const Format f = arena->format();
  if (!f.coded || !f.symmetric || f.k_bits != 8 || f.v_bits != 8) fail("only 8 bits, symmetric, have a running grid");
  const Format& own = exact->format();
  if (own.coded || own.dtype != f.dtype || own.k_dim != f.k_dim || own.v_dim != f.v_dim) fail("exact pages differ");
  const Table to(*arena, table);
  const Array list = moves_array(moves), grids = view(frames, "frames");
  const int64_t width = f.k_dim + f.v_dim;
  expect(grids, "frames", Scalar::f32, {to.segments(), width});
  expect_contiguous(grids, "frames");
  if (exact->segments() != to.segments()) fail("exact pages and table must have equally many segments");
  std::vector<Coming> coming(to.segments());
  std::vector<std::vector<Page>> all(to.segments());
  const auto load = isa().attention->load;
  size_t hint = 0;
  int64_t others = 0, grown = 0;
  const int64_t k_row = int64_t(f.k_dim) * item_size(f.dtype), v_row = int64_t(f.v_dim) * item_size(f.dtype);
  for (int64_t i = 0; i < list.shape[0]; ++i) {
    const int32_t* m = moves_of(list, i);
    const Page target = to.of(m[0], m[2]);
    if (m[1] < 0 || m[1] >= exact->slots()) fail("moves name exact slot " + std::to_string(m[1]));
    const Page from = exact->arena().find(exact->page(m[0], m[1] / PAGE), hint);
    Coming& c = coming[m[0]];
    c.pages.push_back(target);
    c.slots.push_back(m[2] % PAGE);
    const size_t at = c.numbers.size();
    c.numbers.resize(at + width);
    load(from.k + m[1] % PAGE * k_row, f.dtype, f.k_dim, 1.0f, c.numbers.data() + at);
    load(from.v + m[1] % PAGE * v_row, f.dtype, f.v_dim, 1.0f, c.numbers.data() + at + f.k_dim);
  }
  for (int64_t s = 0; s < to.segments(); ++s) {
    for (int64_t p = 0; !coming[s].slots.empty() && p < to.pages.shape[1] && to.number(s, p) >= 0; ++p) {
      all[s].push_back(arena->find(to.number(s, p), hint));
    }
  }
  const auto held = arena->hold(), also_held = exact->arena().hold();
  nb::gil_scoped_release without_gil;
  for (int64_t s = 0; s < to.segments(); ++s) {
    const Coming& c = coming[s];
    if (c.slots.empty()) continue;
    float* frame = grids.as<float>() + s * width;
    const bool first = std::isnan(frame[0]);
    std::vector<float> top(width, 0.0f), old(frame, frame + width);
    for (size_t i = 0; i < c.numbers.size(); ++i) {
      if (std::isfinite(c.numbers[i])) {
        top[i % width] = std::max(top[i % width], std::fabs(c.numbers[i]));
      } else {
        ++others;
      }
    }
    bool exceeded = false;
    for (int64_t d = 0; d < width; ++d) {
      const float need = top[d] / TOP;
      if (first) {
        frame[d] = need > 0.0f ? need : 1.0f;
      } else if (need > frame[d]) {
        frame[d] = need * GROWTH;
        exceeded = true;
      }
    }
    for (const Page& page : all[s]) {
      if (exceeded) rescale(f, page, old.data(), frame);
      std::memcpy(page.grid, frame, f.grid_bytes());
    }
    grown += exceeded;
    for (size_t i = 0; i < c.slots.size(); ++i) {
      const float* x = c.numbers.data() + i * width;
      const Page& page = c.pages[i];
      const int t = c.slots[i];
      for (int d = 0; d < f.k_dim; ++d) {
        page.k[(int64_t(d / 4) * PAGE + t) * 4 + d % 4] = char(code_of(x[d], frame[d]) + 128);
      }
      for (int d = 0; d < f.v_dim; ++d) {
        page.v[int64_t(t / 4) * f.v_dim * 4 + d * 4 + t % 4] = char(code_of(x[f.k_dim + d], frame[f.k_dim + d]));
      }
    }
  }
  return {grown, others};
}

}  // namespace

void bind_units(nb::module_& m) {
  using namespace nb::literals;
  m.def("move_units", &move_units, "arena"_a, "table"_a, "moves"_a, "unit"_a, "fresh_k"_a, "fresh_v"_a, "fresh_grid"_a,
        "Move units of coded entries: moves int32 [M, 3] of (segment, slot, new slot).");
  m.def("code_units", &code_units, "arena"_a, "exact"_a, "table"_a, "moves"_a, "frames"_a,
        "Code exact entries under running grids; returns how many grids grew and how many numbers are not finite.");
}

}  // namespace kvstrata
