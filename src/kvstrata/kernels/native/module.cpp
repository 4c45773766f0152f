// kvstrata._native
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>

#include "arrays.h"
#include "bindings.h"
#include "dispatch.h"
#include "pool.h"

namespace kvstrata {
namespace {

uint64_t read_all(nb::handle buffer, int threads) {
  const Array array = view(buffer, "buffer");
  expect_contiguous(array, "buffer");
  if (threads < 1 || threads > MAX_THREADS) fail("threads must be 1 to " + std::to_string(MAX_THREADS));
  const int64_t bytes = array.size() * array.item, share = int64_t(1) << 20;
  const auto read_bytes = isa().attention->read;
  std::atomic<uint64_t> total{0};
  nb::gil_scoped_release without_gil;
  if (threads == 1) return read_bytes(array.data, bytes);
  parallel(threads, (bytes + share - 1) / share, [&](int64_t item, int) {
    total += read_bytes(array.data + item * share, std::min(share, bytes - item * share));
  });
  return total;
}

}  // namespace
}  // namespace kvstrata

NB_MODULE(_native, m) {
  using namespace nanobind::literals;
  using namespace kvstrata;
  nb::set_leak_warnings(false);  // caches in modules live until the interpreter ends
  m.attr("PAGE") = PAGE;
  m.attr("MAX_THREADS") = MAX_THREADS;
  isa();  // a wrong KVSTRATA_ISA fails here
  m.def("isa", [] { return isa().name; });
  m.def("isas", &isas);
  m.def("_force_isa", &force_isa, "name"_a);
  m.def("read", &read_all, "buffer"_a, "threads"_a = 1);
  bind_arena(m);
  bind_attend(m);
  bind_entries(m);
  bind_codec(m);
  bind_echo(m);
  bind_mass(m);
  bind_norms(m);
  bind_units(m);
}
