// Blocks of pages, and the tables that say which pages a segment has.
#pragma once

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <tuple>
#include <vector>

#include "arrays.h"
#include "format.h"

namespace kvstrata {

using CodecRecord = std::tuple<int, int, bool, bool, int>;  // k_bits, v_bits, symmetric, v_axis is token, window

// Memory of pages first .. first + count - 1; holds the arrays it lies in.
struct Block {
  int64_t first, count;
  char *k, *v, *grid;
  nb::ndarray<> owners[3];
};

class Arena {
 public:
  Arena(const std::string& dtype, const std::optional<CodecRecord>& codec, int k_dim, int v_dim);

  void add(int64_t first, const nb::ndarray<>& k, const nb::ndarray<>& v, const std::optional<nb::ndarray<>>& grid);
  void remove(int64_t first);

  const Format& format() const { return format_; }

  // Addresses of a page; ValueError if no block has it. `hint` remembers where the last one was found.
  Page find(int64_t number, size_t& hint) const;

  // What keeps the memory of all blocks while a call works without the GIL.
  std::vector<std::shared_ptr<const Block>> hold() const { return blocks_; }

 private:
  Format format_;
  std::vector<std::shared_ptr<const Block>> blocks_;  // by first
};

// One tier's pages of all segments, as views of Python's arrays.
class Pages {
 public:
  Pages(Arena* arena, const nb::ndarray<>& table, const nb::ndarray<>& lengths,
        const std::optional<nb::ndarray<>>& fills);

  Arena& arena() const { return *arena_; }
  const Format& format() const { return arena_->format(); }
  int64_t segments() const { return table_.shape[0]; }
  int64_t slots() const { return table_.shape[1] * PAGE; }  // that a segment can have
  int32_t* lengths() const { return lengths_.as<int32_t>(); }
  // Entries of a page among a segment's `length` slots; fewer than these where `fills` says so.
  int32_t entries(int64_t segment, int64_t at, int64_t length) const;
  int32_t page(int64_t segment, int64_t at) const { return table_.as<int32_t>()[segment * table_.stride[0] + at]; }

 private:
  Arena* arena_;
  nb::ndarray<> owners_[3];
  Array table_, lengths_, fills_;
  bool has_fills_;
};

// A tier at one moment: lengths checked against the table, page numbers made addresses.
struct Resolved {
  Format format;
  std::vector<Page> pages;       // of all segments in turn
  std::vector<int64_t> start;    // [S + 1] where a segment's pages begin
  std::vector<int64_t> lengths;  // [S] slots
  std::vector<int64_t> stored;   // [S] entries: as many, unless pages are short
  std::vector<std::shared_ptr<const Block>> held;

  const Page* of(int64_t segment) const { return pages.data() + start[segment]; }
};

// With added[s] entries more than each segment has now (null: none). ValueError where the table or arena lacks pages.
Resolved resolve(const Pages& pages, const int32_t* added, const char* name);

}  // namespace kvstrata
