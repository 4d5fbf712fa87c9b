#include <algorithm>
#include <climits>
#include <cstdlib>
#include <string_view>

#include "kernels/cuda/attention_launch.cuh"

namespace sinkhorn::cuda {

namespace {

bool asks_for_portable() {
  const char* value = std::getenv("SINKHORN_CUDA_PORTABLE");
  const std::string_view word = value == nullptr ? "" : value;
  return !word.empty() && word != "0";
}

// Bytes; as on a smaller card.
int asked_shared() {
  const char* value = std::getenv("SINKHORN_CUDA_SHARED_KB");
  const int kilobytes = value == nullptr ? 0 : std::atoi(value);
  return kilobytes > 0 ? std::min(kilobytes, INT_MAX / 1024) * 1024 : INT_MAX;
}

}  // namespace

bool on_hopper() {
  static const bool portable = asks_for_portable();
  if (portable || !SINKHORN_BUILT_FOR_HOPPER) return false;
  int device = 0, major = 0, minor = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "device");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "device");
  return major == 9 && minor == 0;
}

int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "device");
  return count;
}

int most_shared() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "device");
  static const int asked = asked_shared();
  return std::min(bytes, asked);
}

}  // namespace sinkhorn::cuda
