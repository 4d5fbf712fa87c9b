// The kernels for this processor.
#pragma once

#include "kernels/cpu/table.h"

namespace sinkhorn::cpu {

// The best form this processor runs, or the one that SINKHORN_CPU=baseline|avx2|avx512 names.
// Throws std::invalid_argument if that form is unknown or the processor lacks it.
const KernelTable& kernels();

// "baseline", "avx2" or "avx512".
const char* form();

}  // namespace sinkhorn::cpu
