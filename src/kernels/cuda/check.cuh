// What every launcher ends with: a launch that failed is an exception that names the kernel.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace sinkhorn::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    throw std::runtime_error(
        std::string(what) +
        ": this GPU is older than the CUDA kernels were built for; build with "
        "-DSINKHORN_CUDA_ARCHITECTURES naming it (80 is the oldest supported)");
  }
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

inline void check_launch(const char* what) { check(cudaGetLastError(), what); }

}  // namespace sinkhorn::cuda
