// Which of the compiled instruction sets runs.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace kvstrata {

// Names of the sets that this build has and this CPU can run, best first.
std::vector<std::string> isas();

std::string isa();

// Kernels of the set in use.
const Kernels& kernels();

// Take the named set from now on; ValueError if this build or CPU lacks it.
void force_isa(const std::string& name);

}  // namespace kvstrata
