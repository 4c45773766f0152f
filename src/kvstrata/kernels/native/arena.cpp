#include "arena.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <limits>

#include "bindings.h"

namespace kvstrata {
namespace {

DType parse_dtype(const std::string& name) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    if (name == name_of(scalar_of(dtype))) return dtype;
  }
  fail("dtype must be float32, bfloat16 or float16, not \"" + name + "\"");
}

bool one_of(int value, std::initializer_list<int> choices) {
  return std::find(choices.begin(), choices.end(), value) != choices.end();
}

Format parse_format(const std::string& dtype, const std::optional<CodecRecord>& codec, int k_dim, int v_dim) {
  Format f;
  f.dtype = parse_dtype(dtype);
  f.coded = codec.has_value();
  f.k_dim = k_dim;
  f.v_dim = v_dim;
  const int step = f.coded ? 16 : 8;
  for (int dim : {k_dim, v_dim}) {
    if (dim <= 0 || dim > 1024 || dim % step) {
      fail("k_dim and v_dim must be multiples of " + std::to_string(step) + " up to 1024, not " + std::to_string(dim));
    }
  }
  if (!codec) return f;
  bool by_token;
  std::tie(f.k_bits, f.v_bits, f.symmetric, by_token, f.window) = *codec;
  if (!one_of(f.k_bits, {8, 4, 2}) || !one_of(f.v_bits, {8, 4, 2})) fail("codes have 8, 4 or 2 bits");
  if (!one_of(f.window, {8, 16, 32, 64})) fail("a window has 8, 16, 32 or 64 slots");
  if (f.symmetric && (f.k_bits != 8 || f.v_bits != 8 || f.window != PAGE || by_token)) {
    fail("symmetric codes have 8 bits, a window of 64 and values by channel");
  }
  if (!f.symmetric && !by_token) fail("values are by channel only in symmetric codes");
  return f;
}

// `array` must be `bytes` dense bytes for each of its first axis' pages. Returns how many these are.
int64_t check_block(const Array& array, const char* name, Scalar scalar, int64_t bytes) {
  if (array.scalar != scalar || array.dims < 1) {
    fail(std::string(name) + " must be " + name_of(scalar) + " [pages, ...], not " + array.describe());
  }
  const int64_t pages = array.shape[0];
  if (pages < 1 || array.size() / pages * array.item != bytes) {
    fail(std::string(name) + " must have " + std::to_string(bytes) + " bytes a page, not be " + array.describe());
  }
  expect_contiguous(array, name);
  return pages;
}

// A segment's pages lie anywhere in a block, so with small pages of memory each costs the walk of a table. Where the
// system gives huge ones on request, it does so from the first touch on, which is why blocks are added before that.
void ask_for_huge_pages(const Array& array) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t HUGE = uintptr_t(2) << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(array.data), end = begin + array.size() * array.item;
  const uintptr_t first = (begin + HUGE - 1) / HUGE * HUGE, last = end / HUGE * HUGE;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);  // else nothing is lost
#else
  (void)array;
#endif
}

}  // namespace

Arena::Arena(const std::string& dtype, const std::optional<CodecRecord>& codec, int k_dim, int v_dim)
    : format_(parse_format(dtype, codec, k_dim, v_dim)) {}

void Arena::add(int64_t first, const nb::ndarray<>& k, const nb::ndarray<>& v,
                const std::optional<nb::ndarray<>>& grid) {
  const Scalar payload = format_.coded ? Scalar::u8 : scalar_of(format_.dtype);
  const Array k_view = view(k, "k"), v_view = view(v, "v");
  const int64_t count = check_block(k_view, "k", payload, format_.k_bytes());
  if (check_block(v_view, "v", payload, format_.v_bytes()) != count) fail("k and v must have equally many pages");
  char* grid_data = nullptr;
  if (format_.coded) {
    if (!grid) fail("coded pages need a grid");
    const Array g = view(*grid, "grid");
    if (check_block(g, "grid", scalar_of(format_.grid_dtype()), format_.grid_bytes()) != count) {
      fail("k and grid must have equally many pages");
    }
    grid_data = g.data;
  } else if (grid && view(*grid, "grid").size() != 0) {
    fail("exact pages have no grid");
  }
  if (first < 0 || first > std::numeric_limits<int32_t>::max() - count + 1) fail("first is out of range");
  const auto after = std::lower_bound(blocks_.begin(), blocks_.end(), first,
                                      [](const auto& block, int64_t number) { return block->first < number; });
  const bool overlaps = (after != blocks_.end() && (*after)->first < first + count) ||
                        (after != blocks_.begin() && after[-1]->first + after[-1]->count > first);
  if (overlaps) fail("another block has pages " + std::to_string(first) + " to " + std::to_string(first + count - 1));
  auto block = std::make_shared<Block>(Block{first, count, k_view.data, v_view.data, grid_data, {k, v, {}}});
  if (grid) block->owners[2] = *grid;
  ask_for_huge_pages(k_view);
  ask_for_huge_pages(v_view);
  blocks_.insert(after, std::move(block));
}

void Arena::remove(int64_t first) {
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    if ((*block)->first == first) {
      blocks_.erase(block);
      return;
    }
  }
  fail("no block begins at page " + std::to_string(first));
}

Page Arena::find(int64_t number, size_t& hint) const {
  const auto holds = [&](size_t i) {
    return i < blocks_.size() && number >= blocks_[i]->first && number < blocks_[i]->first + blocks_[i]->count;
  };
  if (!holds(hint)) {
    const auto after = std::upper_bound(blocks_.begin(), blocks_.end(), number,
                                        [](int64_t n, const auto& block) { return n < block->first; });
    hint = size_t(after - blocks_.begin()) - 1;  // wraps where there is none before, and then holds nothing
    if (!holds(hint)) fail("no block has page " + std::to_string(number));
  }
  const Block& block = *blocks_[hint];
  const int64_t at = number - block.first;
  return {block.k + at * format_.k_bytes(), block.v + at * format_.v_bytes(),
          block.grid ? block.grid + at * format_.grid_bytes() : nullptr, int32_t(PAGE)};
}

Pages::Pages(Arena* arena, const nb::ndarray<>& table, const nb::ndarray<>& lengths,
             const std::optional<nb::ndarray<>>& fills)
    : arena_(arena),
      owners_{table, lengths},
      table_(view(table, "table")),
      lengths_(view(lengths, "lengths")),
      has_fills_(fills.has_value()) {
  expect(table_, "table", Scalar::i32, {-1, -1});
  expect_dense_rows(table_, "table");
  expect(lengths_, "lengths", Scalar::i32, {table_.shape[0]});
  expect_contiguous(lengths_, "lengths");
  if (table_.shape[0] == 0) fail("table has no rows");
  if (table_.shape[1] > std::numeric_limits<int32_t>::max() / PAGE) fail("table has too many columns");
  if (!fills) return;
  if (!format().coded) fail("only coded pages may be short");
  owners_[2] = *fills;
  fills_ = view(*fills, "fills");
  expect(fills_, "fills", Scalar::i32, {table_.shape[0], table_.shape[1]});
  expect_dense_rows(fills_, "fills");
}

int32_t Pages::entries(int64_t segment, int64_t at, int64_t length) const {
  const int32_t most = int32_t(std::min<int64_t>(PAGE, length - at * PAGE));
  if (!has_fills_) return most;
  const int32_t n = fills_.as<int32_t>()[segment * fills_.stride[0] + at];
  if (n < 0 || n > most) fail("fills must be 0 to " + std::to_string(most) + ", not " + std::to_string(n));
  return n;
}

Resolved resolve(const Pages& pages, const int32_t* added, const char* name) {
  const int64_t segments = pages.segments();
  Resolved r;
  r.format = pages.format();
  r.held = pages.arena().hold();
  r.start.resize(segments + 1);
  r.lengths.resize(segments);
  r.stored.resize(segments);
  for (int64_t s = 0; s < segments; ++s) {
    const int64_t length = int64_t(pages.lengths()[s]) + (added ? added[s] : 0);
    if (pages.lengths()[s] < 0 || length > pages.slots()) {
      fail(std::string(name) + ": segment " + std::to_string(s) + " would hold " + std::to_string(length) +
           " entries, its table has room for " + std::to_string(pages.slots()));
    }
    r.lengths[s] = length;
    r.start[s + 1] = r.start[s] + (length + PAGE - 1) / PAGE;
  }
  r.pages.reserve(r.start[segments]);
  size_t hint = 0;
  for (int64_t s = 0; s < segments; ++s) {
    for (int64_t at = 0; at < r.start[s + 1] - r.start[s]; ++at) {
      r.pages.push_back(pages.arena().find(pages.page(s, at), hint));
      r.pages.back().entries = pages.entries(s, at, r.lengths[s]);
      r.stored[s] += r.pages.back().entries;
    }
  }
  return r;
}

void bind_arena(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Arena>(m, "Arena")
      .def(nb::init<const std::string&, const std::optional<CodecRecord>&, int, int>(), "dtype"_a, "codec"_a.none(),
           "k_dim"_a, "v_dim"_a)
      .def("add", &Arena::add, "first"_a, "k"_a, "v"_a, "grid"_a.none() = nb::none())
      .def("remove", &Arena::remove, "first"_a);
  nb::class_<Pages>(m, "Pages")
      .def(nb::init<Arena*, const nb::ndarray<>&, const nb::ndarray<>&, const std::optional<nb::ndarray<>>&>(),
           "arena"_a, "table"_a, "lengths"_a, "fills"_a.none() = nb::none(), nb::keep_alive<1, 2>());
}

}  // namespace kvstrata
