#include "kernels/common/executor.h"

#include <cstdlib>
#include <new>

namespace sinkhorn {

void* allocate_scratch(size_t bytes) {
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void free_scratch(void* scratch) noexcept { std::free(scratch); }

}  // namespace sinkhorn
