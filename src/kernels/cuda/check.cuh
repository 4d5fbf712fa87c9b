// What every launcher ends with: a launch that failed is an exception that names the kernel.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace sinkhorn::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();  // or the next launch would be taken for this one
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    throw std::runtime_error(
        std::string(what) +
        ": the CUDA kernels were not built for this GPU; build with "
        "-DSINKHORN_CUDA_ARCHITECTURES naming it (80 is the oldest supported), or use the CPU");
  }
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline void check_launch(const char* what) { check(cudaGetLastError(), what); }

}  // namespace sinkhorn::cuda
