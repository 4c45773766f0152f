#include "dense.h"

#include <cmath>

#include "pool.h"

namespace kvstrata {

static constexpr double LOG2_E = 1.4426950408889634;

DenseInputs::DenseInputs(nb::handle q_object, nb::handle k_object, double scale, double softcap, int threads)
    : q(view(q_object, "q")), k(view(k_object, "k")) {
  const DType dtype = dtype_of(q, "q");
  expect(q, "q", q.scalar, {-1, -1, -1, -1});
  expect(k, "k", q.scalar, {q.shape[0], -1, -1, q.shape[3]});
  expect_dense_rows(q, "q");
  expect_dense_rows(k, "k");
  batch = q.shape[0];
  heads = k.shape[1];
  const int64_t queries = q.shape[2], keys = k.shape[2], dim = q.shape[3];
  if (q.size() == 0 || k.size() == 0) fail("q " + q.describe() + " or k " + k.describe() + " is empty");
  if (q.shape[1] % heads) fail(q.describe() + " has no multiple of " + std::to_string(heads) + " query heads");
  if (dim > 4096 || q.shape[1] > 65536 || keys > (int64_t(1) << 31) || queries > (int64_t(1) << 31)) {
    fail("q " + q.describe() + " or k " + k.describe() + " is too large");
  }
  if (!std::isfinite(scale)) fail("scale must be finite");
  if (!(softcap >= 0) || std::isinf(softcap)) fail("softcap must be finite and not negative, 0 for none");
  if (threads < 1 || threads > MAX_THREADS) fail("threads must be 1 to " + std::to_string(MAX_THREADS));
  first = {dtype, int(dim), int(q.shape[1] / heads),
           q.data, q.stride[1] * q.item, q.stride[2] * q.item, queries,
           k.data, k.stride[2] * k.item, keys,
           float(softcap > 0 ? scale / softcap : scale * LOG2_E), float(softcap * LOG2_E)};
}

void DenseInputs::expect_causal() const {
  if (first.queries > first.keys) {
    fail("queries are the last of the keys: " + q.describe() + " has more than " + k.describe());
  }
}

Dense DenseInputs::at(int64_t n) const {
  Dense dense = first;
  dense.q += (n / heads * q.stride[0] + n % heads * dense.group * q.stride[1]) * q.item;
  dense.k += (n / heads * k.stride[0] + n % heads * k.stride[1]) * k.item;
  return dense;
}

}  // namespace kvstrata
