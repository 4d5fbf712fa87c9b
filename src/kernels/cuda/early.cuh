// Launches that may begin while the one before them ends, so that the microsecond or two that a
// card takes to start a kernel passes beside work. For kernels of little work only: the CTAs that
// wait take room from those that work, and at tens of millions of numbers steps and operators were
// 2 to 4% slower for it (H200).
#pragma once

#include <cstdint>

#include "kernels/cuda/check.cuh"
#include "kernels/cuda/stream.h"

namespace sinkhorn::cuda {

// Lets the next launch begin when all CTAs have come here or ended.
__device__ __forceinline__ void release_next_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until the launch before has ended, and so those before it.
__device__ __forceinline__ void wait_for_previous_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// What a kernel launched by launch_early does before it touches memory; from there on it runs as if
// launched in order.
__device__ __forceinline__ void begin_early() {
  wait_for_previous_launch();
  release_next_launch();
}

// Whether the code that this card runs of a kernel is one that waits.
template <class Kernel>
bool can_wait(Kernel* kernel, const char* name) {
  cudaFuncAttributes code;
  check(cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(kernel)), name);
  return code.ptxVersion >= 90 && code.binaryVersion >= 90;
}

template <class Kernel>
void allow_shared(Kernel kernel, int bytes, const char* name) {
  if (bytes <= 48 * 1024) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), name);
}

// Of a kernel that, if it is to begin early, waits.
template <class... Parameters, class... Arguments>
void launch_beside(bool early, const char* name, void (*kernel)(Parameters...), dim3 grid,
                   dim3 threads, int shared, Stream stream, const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  allow_shared(kernel, shared, name);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = threads;
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

constexpr int64_t kLittleWork = int64_t{1} << 21;  // numbers

// Of a kernel that begins with begin_early and goes through so many numbers.
template <class... Parameters, class... Arguments>
void launch_early(int64_t numbers, const char* name, void (*kernel)(Parameters...), dim3 grid,
                  dim3 threads, int shared, Stream stream, const Arguments&... arguments) {
  const bool early = numbers <= kLittleWork && can_wait(kernel, name);
  launch_beside(early, name, kernel, grid, threads, shared, stream, arguments...);
}

}  // namespace sinkhorn::cuda
