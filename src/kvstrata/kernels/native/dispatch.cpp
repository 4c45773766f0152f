#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace kvstrata {

#define KVSTRATA_DECLARE(set)              \
  namespace set {                          \
  extern const Kernels KERNELS;            \
  extern const CodecKernels CODEC_KERNELS; \
  extern const MassKernels MASS_KERNELS;   \
  extern const EchoKernels ECHO_KERNELS;   \
  extern const NormKernels NORM_KERNELS;   \
  }
KVSTRATA_DECLARE(portable)
KVSTRATA_DECLARE(avx2)
KVSTRATA_DECLARE(avx512)
#undef KVSTRATA_DECLARE

namespace {

std::vector<Isa> built() {
  std::vector<Isa> found;
#if defined(KVSTRATA_HAS_AVX512)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  found.push_back({"avx512", &avx512::KERNELS, &avx512::CODEC_KERNELS, &avx512::MASS_KERNELS, &avx512::ECHO_KERNELS,
                   &avx512::NORM_KERNELS, bool(avx512)});
#endif
#if defined(KVSTRATA_HAS_AVX2)
  // every CPU with AVX2 and FMA that was ever sold has F16C, which older compilers cannot ask for
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  found.push_back({"avx2", &avx2::KERNELS, &avx2::CODEC_KERNELS, &avx2::MASS_KERNELS, &avx2::ECHO_KERNELS,
                   &avx2::NORM_KERNELS, bool(avx2)});
#endif
  found.push_back({"portable", &portable::KERNELS, &portable::CODEC_KERNELS, &portable::MASS_KERNELS,
                   &portable::ECHO_KERNELS, &portable::NORM_KERNELS, true});
  return found;
}

const std::vector<Isa>& table() {
  static const std::vector<Isa> all = built();
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

const Isa& isa() { return *chosen().load(); }

void force_isa(const std::string& name) { chosen().store(find(name)); }

}  // namespace kvstrata
