#include "kernels/cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace sinkhorn::cpu {

#if defined(__x86_64__)
namespace avx2 {
const KernelTable& table();
}
namespace avx512 {
const KernelTable& table();
}
#endif

namespace {

struct Form {
  const char* name;
  bool runs;
  const KernelTable& (*table)();
};

const Form& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  // Best first.
  static const Form forms[] = {{"avx512", has_avx512, avx512::table},
                               {"avx2", has_avx2, avx2::table},
                               {"baseline", true, baseline::table}};
#else
  static const Form forms[] = {{"baseline", true, baseline::table}};
#endif
  const char* wanted = std::getenv("SINKHORN_CPU");
  for (const Form& form : forms) {
    if (wanted == nullptr || *wanted == '\0') {
      if (form.runs) return form;
    } else if (std::string(wanted) == form.name) {
      if (form.runs) return form;
      throw std::invalid_argument(std::string("SINKHORN_CPU=") + wanted +
                                  ": this processor lacks those instructions");
    }
  }
  throw std::invalid_argument(std::string("SINKHORN_CPU=") + wanted +
                              ": expected baseline, avx2 or avx512");
}

const Form& chosen() {
  static const Form& form = choose();
  return form;
}

}  // namespace

const KernelTable& kernels() { return chosen().table(); }
const char* form() { return chosen().name; }

}  // namespace sinkhorn::cpu
