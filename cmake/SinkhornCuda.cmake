# Whether there is a CUDA toolkit to build kernels with, and for which cards. The operators work on
# CUDA tensors either way: without kernels of our own they are made of Torch's operations.
#
# 90a: Hopper, machine code. 80: Ampere, machine code, and PTX that later cards compile at start.
set(SINKHORN_CUDA_ARCHITECTURES 80 90a-real CACHE STRING "GPU architectures of the CUDA kernels")

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

# After Torch is found: kernels are of use only beside a Torch that has CUDA.
macro(sinkhorn_find_cuda_compiler)
  set(SINKHORN_CUDA_KERNELS OFF)
  if(SINKHORN_HAS_CUDA AND EXISTS ${SINKHORN_TORCH}/lib/libtorch_cuda.so)
    set(CMAKE_CUDA_ARCHITECTURES ${SINKHORN_CUDA_ARCHITECTURES})
    if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
      set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
    endif()
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(SINKHORN_CUDA_KERNELS ON)
  endif()
endmacro()
