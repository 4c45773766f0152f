// Which of the compiled instruction sets runs.
#pragma once

#include <string>
#include <vector>

#include "codec.h"
#include "echo.h"
#include "kernels.h"
#include "mass.h"
#include "norms.h"

namespace kvstrata {

// One instruction set: its kernels, and whether this CPU can run them.
struct Isa {
  const char* name;
  const Kernels* attention;
  const CodecKernels* codec;
  const MassKernels* mass;
  const EchoKernels* echo;
  const NormKernels* norms;
  bool runs;
};

// Names of the sets that this build has and this CPU can run, best first.
std::vector<std::string> isas();

// The set in use; std::invalid_argument if KVSTRATA_ISA names one that this build or CPU lacks.
const Isa& isa();

// Take the named set from now on; std::invalid_argument as above.
void force_isa(const std::string& name);

}  // namespace kvstrata
