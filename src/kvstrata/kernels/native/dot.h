// Sums of products of codes with 16-bit multipliers, exact in 32-bit integers.
//
// Bytes hold four codes for each of LANES slots (or channels), as pages store them. Four multipliers take eight bytes,
// arranged by `arrange_multipliers`; `Dot` collects sums of one vector. Codes are unsigned (KEYS) or of either sign
// (VALUES); multipliers are the reverse: of either sign up to max_multiplier<KEYS>, or not negative.
#pragma once

#include "simd.h"

namespace kvstrata::KVSTRATA_ISA {

enum class Side { KEYS, VALUES };

}  // namespace kvstrata::KVSTRATA_ISA

#if defined(KVSTRATA_ISA_AVX512)
#include "dot_avx512.h"
#elif defined(KVSTRATA_ISA_AVX2)
#include "dot_avx2.h"
#endif
