// pack and unpack, for Python.
#include "codec.h"

#include "arena.h"
#include "bindings.h"
#include "dispatch.h"
#include "thread_scratch.h"

namespace kvstrata {

namespace {

// Whole pages [n, 64, dim] of numbers with dense rows.
Array numbers(nb::handle object, const char* name, Scalar scalar, int64_t pages, int dim) {
  const Array array = view(object, name);
  expect(array, name, scalar, {pages, PAGE, dim});
  expect_dense_rows(array, name);
  return array;
}

Rows rows_of(const Array& array, int64_t page) {
  return {array.data + page * array.stride[0] * array.item, array.stride[1] * array.item};
}

// n pages of codes or of a grid, dense.
char* stored(nb::handle object, const char* name, Scalar scalar, int64_t pages, int64_t bytes) {
  const Array array = view(object, name);
  const bool fits = array.scalar == scalar && array.dims > 0 && array.shape[0] == pages;
  if (!fits || array.size() * array.item != pages * bytes) {
    fail(std::string(name) + " must be " + name_of(scalar) + " of " + std::to_string(pages) + " pages of " +
         std::to_string(bytes) + " bytes, not " + array.describe());
  }
  expect_contiguous(array, name);
  return array.data;
}

// Addresses of the first page; those of the others follow.
Page stored_pages(const Format& f, nb::handle k, nb::handle v, nb::handle grid, int64_t pages) {
  return {stored(k, "k_codes", Scalar::u8, pages, f.k_bytes()), stored(v, "v_codes", Scalar::u8, pages, f.v_bytes()),
          stored(grid, "grid", scalar_of(f.grid_dtype()), pages, f.grid_bytes()), PAGE};
}

Page page_at(const Format& f, const Page& first, int64_t i) {
  return {first.k + i * f.k_bytes(), first.v + i * f.v_bytes(), first.grid + i * f.grid_bytes(), PAGE};
}

const Format& coded(const Arena& arena) {
  if (!arena.format().coded) fail("pages of an exact arena have no codes");
  return arena.format();
}

int64_t pack(const Arena& arena, nb::handle k, nb::handle v, nb::handle k_codes, nb::handle v_codes, nb::handle grid) {
  const Format f = coded(arena);
  const Array k_rows = numbers(k, "k", scalar_of(f.dtype), -1, f.k_dim);
  const int64_t pages = k_rows.shape[0];
  const Array v_rows = numbers(v, "v", scalar_of(f.dtype), pages, f.v_dim);
  const Page to = stored_pages(f, k_codes, v_codes, grid, pages);
  const CodecKernels& kernels = *isa().codec;
  nb::gil_scoped_release without_gil;
  const ThreadScratch scratch(kernels.scratch_bytes(f), 1);
  int64_t others = 0;
  for (int64_t i = 0; i < pages; ++i) {
    others += kernels.pack(f, rows_of(k_rows, i), rows_of(v_rows, i), page_at(f, to, i), scratch.of(0));
  }
  return others;
}

void unpack(const Arena& arena, nb::handle k_codes, nb::handle v_codes, nb::handle grid, nb::handle k_out,
            nb::handle v_out) {
  const Format f = coded(arena);
  const Array k_rows = numbers(k_out, "k_out", Scalar::f32, -1, f.k_dim);
  const int64_t pages = k_rows.shape[0];
  const Array v_rows = numbers(v_out, "v_out", Scalar::f32, pages, f.v_dim);
  const Page from = stored_pages(f, k_codes, v_codes, grid, pages);
  const CodecKernels& kernels = *isa().codec;
  nb::gil_scoped_release without_gil;
  const ThreadScratch scratch(kernels.scratch_bytes(f), 1);
  for (int64_t i = 0; i < pages; ++i) {
    kernels.unpack(f, page_at(f, from, i), rows_of(k_rows, i), rows_of(v_rows, i), scratch.of(0));
  }
}

}  // namespace

void bind_codec(nb::module_& m) {
  using namespace nb::literals;
  m.def("pack", &pack, "arena"_a, "k"_a, "v"_a, "k_codes"_a, "v_codes"_a, "grid"_a,
        "Code whole pages k [n, 64, D] and v [n, 64, Dv]; returns how many numbers are not finite.");
  m.def("unpack", &unpack, "arena"_a, "k_codes"_a, "v_codes"_a, "grid"_a, "k_out"_a, "v_out"_a,
        "Write pages as fp32 to k_out [n, 64, D] and v_out [n, 64, Dv].");
}

}  // namespace kvstrata
