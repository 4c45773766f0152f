#include "entries.h"

#include <cstring>

#include "bindings.h"
#include "pool.h"

namespace kvstrata {

NewEntries new_entries(nb::handle k, nb::handle v, const Format& format, int64_t segments, int64_t heads) {
  if (format.coded) fail("entries are appended to exact pages only");
  NewEntries e{view(k, "new_k"), view(v, "new_v")};
  const Scalar scalar = scalar_of(format.dtype);
  expect(e.k, "new_k", scalar, {-1, heads ? heads : -1, -1, format.k_dim});
  expect(e.v, "new_v", scalar, {e.k.shape[0], e.k.shape[1], e.k.shape[2], format.v_dim});
  expect_dense_rows(e.k, "new_k");
  expect_dense_rows(e.v, "new_v");
  if (e.k.size() == 0) fail("new_k is empty");
  if (e.k.shape[0] * e.k.shape[1] != segments) {
    fail("new_k is " + e.k.describe() + " where the pages have " + std::to_string(segments) + " segments");
  }
  return e;
}

std::vector<int32_t> tokens_of(nb::handle tokens, int64_t batch, int64_t queries) {
  if (queries > std::numeric_limits<int32_t>::max()) fail("too many queries");
  if (tokens.is_none()) return std::vector<int32_t>(batch, int32_t(queries));
  const Array array = view(tokens, "tokens");
  expect(array, "tokens", Scalar::i32, {batch});
  expect_contiguous(array, "tokens");
  std::vector<int32_t> copy(array.as<int32_t>(), array.as<int32_t>() + batch);
  for (int32_t n : copy) {
    if (n < 0 || n > queries) fail("tokens must be 0 to " + std::to_string(queries) + ", not " + std::to_string(n));
  }
  return copy;
}

std::vector<int32_t> for_segments(const std::vector<int32_t>& tokens, int64_t heads) {
  std::vector<int32_t> each;
  for (int32_t n : tokens) each.insert(each.end(), heads, n);
  return each;
}

void write(const NewEntries& from, const std::vector<int32_t>& tokens, const Resolved& to) {
  const int64_t heads = from.k.shape[1], queries = from.k.shape[2], item = from.k.item;
  const int64_t k_row = to.format.k_dim * item, v_row = to.format.v_dim * item;
  for (int64_t b = 0; b < from.k.shape[0]; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t s = b * heads + h;
      for (int64_t i = 0; i < tokens[b]; ++i) {
        const int64_t slot = to.lengths[s] - tokens[b] + i, query = queries - tokens[b] + i;
        const Page& page = to.of(s)[slot / PAGE];
        const auto row = [&](const Array& a) {
          return a.data + (b * a.stride[0] + h * a.stride[1] + query * a.stride[2]) * item;
        };
        std::memcpy(page.k + slot % PAGE * k_row, row(from.k), k_row);
        std::memcpy(page.v + slot % PAGE * v_row, row(from.v), v_row);
      }
    }
  }
}

namespace {

void append(Pages* pages, nb::handle new_k, nb::handle new_v, nb::handle tokens) {
  const NewEntries entries = new_entries(new_k, new_v, pages->format(), pages->segments(), 0);
  const std::vector<int32_t> taken = tokens_of(tokens, entries.k.shape[0], entries.k.shape[2]);
  const std::vector<int32_t> added = for_segments(taken, entries.k.shape[1]);
  const Resolved to = resolve(*pages, added.data(), "pages");
  for (size_t s = 0; s < added.size(); ++s) pages->lengths()[s] += added[s];
  nb::gil_scoped_release without_gil;
  write(entries, taken, to);
}

// The pages of one segment that `move` may touch, found when first needed.
struct Moved {
  const char *from_k, *from_v;
  char *to_k, *to_v;
};

std::vector<std::vector<Moved>> plan_moves(const Pages& source, const Pages& target, const Array& order) {
  const Format& f = source.format();
  const int64_t k_row = int64_t(f.k_dim) * item_size(f.dtype), v_row = int64_t(f.v_dim) * item_size(f.dtype);
  std::vector<std::vector<Moved>> moves(source.segments());
  size_t from_hint = 0, to_hint = 0;
  for (int64_t s = 0; s < source.segments(); ++s) {
    const int32_t* slots = order.as<int32_t>() + s * order.stride[0];
    for (int64_t j = 0; j < order.shape[1]; ++j) {
      const int64_t slot = slots[j];
      if (slot < 0 || (slot == j && &source == &target)) continue;
      if (slot >= source.slots() || j >= target.slots()) {
        fail("order moves slot " + std::to_string(slot) + " to slot " + std::to_string(j) + " of segment " +
             std::to_string(s) + ", which its table has not");
      }
      const Page from = source.arena().find(source.page(s, slot / PAGE), from_hint);
      const Page to = target.arena().find(target.page(s, j / PAGE), to_hint);
      moves[s].push_back({from.k + slot % PAGE * k_row, from.v + slot % PAGE * v_row, to.k + j % PAGE * k_row,
                          to.v + j % PAGE * v_row});
    }
  }
  return moves;
}

void move(Pages* source, Pages* target, nb::handle order, int threads) {
  const Format f = source->format();
  if (f.coded || !(f == target->format())) fail("entries move between exact pages of one format only");
  if (source->segments() != target->segments()) fail("source and target must have equally many segments");
  if (threads < 1 || threads > MAX_THREADS) fail("threads must be 1 to " + std::to_string(MAX_THREADS));
  const Array slots = view(order, "order");
  expect(slots, "order", Scalar::i32, {source->segments(), -1});
  expect_dense_rows(slots, "order");
  const std::vector<std::vector<Moved>> moves = plan_moves(*source, *target, slots);
  const auto held = source->arena().hold(), also_held = target->arena().hold();
  const int64_t k_row = int64_t(f.k_dim) * item_size(f.dtype), v_row = int64_t(f.v_dim) * item_size(f.dtype);
  nb::gil_scoped_release without_gil;
  parallel(threads, int64_t(moves.size()), [&](int64_t s, int) {
    for (const Moved& m : moves[s]) {
      std::memmove(m.to_k, m.from_k, k_row);
      std::memmove(m.to_v, m.from_v, v_row);
    }
  });
}

void gather(Pages* pages, nb::handle segments, nb::handle slots, nb::handle k_out, nb::handle v_out) {
  const Format f = pages->format();
  if (f.coded) fail("entries are gathered from exact pages only");
  const Array segment = view(segments, "segment"), slot = view(slots, "slot"), k = view(k_out, "k_out"),
              v = view(v_out, "v_out");
  expect(segment, "segment", Scalar::i32, {-1});
  expect_contiguous(segment, "segment");
  const int64_t count = segment.shape[0];
  expect(slot, "slot", Scalar::i32, {count});
  expect_contiguous(slot, "slot");
  expect(k, "k_out", scalar_of(f.dtype), {count, f.k_dim});
  expect_contiguous(k, "k_out");
  expect(v, "v_out", scalar_of(f.dtype), {count, f.v_dim});
  expect_contiguous(v, "v_out");
  const int64_t k_row = int64_t(f.k_dim) * item_size(f.dtype), v_row = int64_t(f.v_dim) * item_size(f.dtype);
  std::vector<std::pair<const char*, const char*>> rows(count);
  size_t hint = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t s = segment.as<int32_t>()[i], at = slot.as<int32_t>()[i];
    if (s < 0 || s >= pages->segments() || at < 0 || at >= pages->slots()) {
      fail("segment " + std::to_string(s) + " has no slot " + std::to_string(at));
    }
    const Page page = pages->arena().find(pages->page(s, at / PAGE), hint);
    rows[i] = {page.k + at % PAGE * k_row, page.v + at % PAGE * v_row};
  }
  const auto held = pages->arena().hold();
  nb::gil_scoped_release without_gil;
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(k.data + i * k_row, rows[i].first, k_row);
    std::memcpy(v.data + i * v_row, rows[i].second, v_row);
  }
}

}  // namespace

void bind_entries(nb::module_& m) {
  using namespace nb::literals;
  m.def("append", &append, "pages"_a, "new_k"_a, "new_v"_a, "tokens"_a.none() = nb::none());
  m.def("gather", &gather, "pages"_a, "segment"_a, "slot"_a, "k_out"_a, "v_out"_a);
  m.def("move", &move, "source"_a, "target"_a, "order"_a, "threads"_a = 1);
}

}  // namespace kvstrata
