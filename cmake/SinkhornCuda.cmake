# Whether there is a CUDA toolkit to build kernels with, and for which cards. The operators work on
# CUDA tensors either way: without kernels of our own they are made of Torch's operations.
set(SINKHORN_CUDA_ARCHITECTURES 80 90a CACHE STRING "GPU architectures of the CUDA kernels")

set(SINKHORN_HAS_CUDA OFF)
if(NOT SINKHORN_CUDA STREQUAL "OFF")
  find_package(CUDAToolkit QUIET)
  if(CUDAToolkit_FOUND)
    set(SINKHORN_HAS_CUDA ON)
  elseif(SINKHORN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SINKHORN_CUDA=ON, but no CUDA toolkit was found; install one, "
                        "set CUDAToolkit_ROOT, or configure with -DSINKHORN_CUDA=OFF")
  endif()
endif()
if(SINKHORN_HAS_CUDA)
  message(STATUS "CUDA toolkit ${CUDAToolkit_VERSION} in ${CUDAToolkit_BIN_DIR}")
else()
  message(STATUS "CUDA toolkit: none used")
endif()
