// What a launch that failed says. Needs the CUDA headers, not a GPU.
#include <gtest/gtest.h>

#include "kernels/cuda/check.cuh"

namespace sinkhorn::cuda {
namespace {

std::string message_of(cudaError_t status) {
  try {
    check(status, "attention_fwd");
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(CudaCheckTest, SuccessIsSilent) { EXPECT_EQ(message_of(cudaSuccess), ""); }

TEST(CudaCheckTest, ACardThatTheBuildDoesNotKnowIsToldWhatToDo) {
  for (const cudaError_t status :
       {cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction}) {
    EXPECT_EQ(message_of(status),
              "attention_fwd: the CUDA kernels were not built for this GPU; build with "
              "-DSINKHORN_CUDA_ARCHITECTURES naming it (80 is the oldest supported), or use the "
              "CPU");
  }
}

TEST(CudaCheckTest, OtherFailuresNameTheKernelAndTheReason) {
  EXPECT_EQ(message_of(cudaErrorInvalidValue),
            std::string("attention_fwd: ") + cudaGetErrorString(cudaErrorInvalidValue));
}

}  // namespace
}  // namespace sinkhorn::cuda
