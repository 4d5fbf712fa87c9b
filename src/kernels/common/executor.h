// How a kernel gets its threads and its scratch memory.
#pragma once

#include <cstddef>

namespace sinkhorn {

// Runs body(context, worker) once for each worker in 0 .. workers-1, perhaps at the same time.
struct Executor {
  int workers;
  void (*run)(int workers, void (*body)(void* context, int worker), void* context);
};

// 64-byte aligned; throws std::bad_alloc. Kept out of the kernel files so that no instruction set
// leaks into shared code.
void* allocate_scratch(size_t bytes);
void free_scratch(void* scratch) noexcept;

}  // namespace sinkhorn
