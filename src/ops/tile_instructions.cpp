// Processors of some virtual machines name AMX, the instructions for tiles, and leave empty the
// page that tells the tiles' sizes. oneDNN, which does Torch's products in bf16, then makes code
// that the processor refuses, and the program ends by an illegal instruction. There it is told to
// do without AMX, when the library is loaded and before oneDNN first asks; ONEDNN_MAX_CPU_ISA, if
// set, stays.
#if defined(__x86_64__)

#include <cpuid.h>

#include <cstdlib>

namespace sinkhorn::ops {
namespace {

bool names_tiles_without_sizes() {
  constexpr unsigned kFeatures = 7, kTiles = 0x1D, kTileBit = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(kFeatures, 0, &a, &b, &c, &d) == 0 || (d & kTileBit) == 0) return false;
  if (__get_cpuid_count(kTiles, 0, &a, &b, &c, &d) == 0 || a == 0) return true;  // no palette
  return __get_cpuid_count(kTiles, 1, &a, &b, &c, &d) == 0 || a == 0;  // bytes of its tiles
}

[[maybe_unused]] const bool settled = [] {
  const bool avoid = names_tiles_without_sizes();
  const bool told = std::getenv("DNNL_MAX_CPU_ISA") != nullptr;  // its older name
  if (avoid && !told) setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16", /*overwrite=*/0);
  return avoid;
}();

}  // namespace
}  // namespace sinkhorn::ops

#endif
