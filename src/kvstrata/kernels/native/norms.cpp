// Norms of products, for Python.
#include "norms.h"

#include <algorithm>

#include "arrays.h"
#include "bindings.h"
#include "dispatch.h"
#include "pool.h"
#include "thread_scratch.h"

namespace kvstrata {

namespace {

void output_norms(nb::handle outputs, nb::handle v, nb::handle norms_out, int threads) {
  const Array matrices = view(outputs, "outputs"), values = view(v, "v"), out = view(norms_out, "norms_out");
  expect(values, "v", values.scalar, {-1, -1, -1, -1});
  const DType dtype = dtype_of(values, "v");
  expect_dense_rows(values, "v");
  const int64_t batch = values.shape[0], heads = values.shape[1], count = values.shape[2], dim = values.shape[3];
  if (values.size() == 0) fail("v " + values.describe() + " is empty");
  expect(matrices, "outputs", Scalar::f32, {-1, dim, dim});
  expect_contiguous(matrices, "outputs");
  if (matrices.shape[0] == 0 || matrices.shape[0] % heads) {
    fail(matrices.describe() + " has no multiple of " + std::to_string(heads) + " query heads");
  }
  if (dim > 4096 || matrices.shape[0] > 65536) fail("outputs " + matrices.describe() + " is too large");
  const int64_t group = matrices.shape[0] / heads;
  expect(out, "norms_out", Scalar::f32, {batch, heads, group, count});
  expect_contiguous(out, "norms_out");
  if (threads < 1 || threads > MAX_THREADS) fail("threads must be 1 to " + std::to_string(MAX_THREADS));
  const NormKernels& kernels = *isa().norms;
  nb::gil_scoped_release without_gil;

  const auto of = [&](int64_t segment) {
    const int64_t row = segment / heads, head = segment % heads;
    const char* first = values.data + (row * values.stride[0] + head * values.stride[1]) * values.item;
    return Norms{dtype, int(dim), int(group), first, values.stride[2] * values.item,
                 matrices.as<float>() + head * group * dim * dim};
  };
  const int64_t segments = batch * heads, items = segments * ((count + NORM_VALUES - 1) / NORM_VALUES);
  const ThreadScratch scratch(kernels.scratch_bytes(of(0)), std::min<int64_t>(threads, items));
  parallel(threads, items, [&](int64_t item, int thread) {
    const int64_t segment = item % segments, start = item / segments * NORM_VALUES;
    kernels.norms(of(segment), start, std::min(count, start + NORM_VALUES), out.as<float>() + segment * group * count,
                  count, scratch.of(thread));
  });
}

}  // namespace

void bind_norms(nb::module_& m) {
  using namespace nb::literals;
  m.def("output_norms", &output_norms, "outputs"_a, "v"_a, "norms_out"_a, nb::kw_only(), "threads"_a = 1,
        "Norms of values v [B, H, S, D] times outputs [H*G, D, D], to norms_out [B, H, G, S].");
}

}  // namespace kvstrata
