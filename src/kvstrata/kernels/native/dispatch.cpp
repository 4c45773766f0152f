#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace kvstrata {

namespace portable {
extern const Kernels KERNELS;
}
namespace avx2 {
extern const Kernels KERNELS;
}
namespace avx512 {
extern const Kernels KERNELS;
}

namespace {

struct Isa {
  const char* name;
  const Kernels* kernels;
  bool runs;
};

const std::vector<Isa>& table() {
  static const std::vector<Isa> all = [] {
    std::vector<Isa> found;
#if defined(KVSTRATA_HAS_AVX512)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    found.push_back({"avx512", &avx512::KERNELS, bool(avx512)});
#endif
#if defined(KVSTRATA_HAS_AVX2)
    // every CPU with AVX2 and FMA that was ever sold has F16C, which older compilers cannot ask for
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    found.push_back({"avx2", &avx2::KERNELS, bool(avx2)});
#endif
    found.push_back({"portable", &portable::KERNELS, true});
    return found;
  }();
  return all;
}

const Isa* find(const std::string& name) {
  for (const Isa& isa : table()) {
    if (name == isa.name && isa.runs) return &isa;
  }
  std::string there;
  for (const std::string& other : isas()) there += (there.empty() ? "" : ", ") + other;
  throw std::invalid_argument("no instruction set \"" + name + "\" in this build on this CPU; there are: " + there);
}

const Isa* choose() {
  const char* forced = std::getenv("KVSTRATA_ISA");
  return find(forced && *forced ? forced : isas().front());
}

std::atomic<const Isa*>& chosen() {
  static std::atomic<const Isa*> isa{choose()};
  return isa;
}

}  // namespace

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Isa& isa : table()) {
    if (isa.runs) names.emplace_back(isa.name);
  }
  return names;
}

std::string isa() { return chosen().load()->name; }

const Kernels& kernels() { return *chosen().load()->kernels; }

void force_isa(const std::string& name) { chosen().store(find(name)); }

}  // namespace kvstrata
