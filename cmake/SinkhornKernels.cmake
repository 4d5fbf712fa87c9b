# The CPU kernels: one set of sources, compiled once per instruction set into a namespace of its own.
# src/kernels/cpu/dispatch.cpp picks one at run time, so one library serves every x86-64 processor.
set(SINKHORN_KERNEL_SOURCES
    src/kernels/cpu/attention.cpp
    src/kernels/cpu/balance_causal.cpp
    src/kernels/cpu/balance_full.cpp
    src/kernels/cpu/pool.cpp
    src/kernels/cpu/sort.cpp
    src/kernels/cpu/sortcut.cpp
    src/kernels/cpu/table.cpp)

set(SINKHORN_ISAS baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  list(APPEND SINKHORN_ISAS avx2 avx512)
endif()
set(SINKHORN_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(SINKHORN_FLAGS_avx512 ${SINKHORN_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq
                          -mprefer-vector-width=512)

function(sinkhorn_sanitize target)
  if(SINKHORN_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${SINKHORN_SANITIZE} -g
                                             -fno-omit-frame-pointer -fno-sanitize-recover=all)
    target_link_options(${target} PUBLIC -fsanitize=${SINKHORN_SANITIZE})
  endif()
endfunction()

function(sinkhorn_kernel_options target)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  # Vectors are never passed between files, so their calling convention does not matter.
  target_compile_options(${target} PRIVATE -O3 -ffp-contract=fast -fno-math-errno
                                           -fvisibility=hidden -Wno-psabi)
  sinkhorn_sanitize(${target})
  sinkhorn_warnings(${target})
endfunction()

set(SINKHORN_KERNEL_OBJECTS)
foreach(isa ${SINKHORN_ISAS})
  add_library(sinkhorn_kernels_${isa} OBJECT ${SINKHORN_KERNEL_SOURCES})
  target_compile_definitions(sinkhorn_kernels_${isa} PRIVATE SINKHORN_ISA=${isa})
  target_compile_options(sinkhorn_kernels_${isa} PRIVATE ${SINKHORN_FLAGS_${isa}})
  sinkhorn_kernel_options(sinkhorn_kernels_${isa})
  list(APPEND SINKHORN_KERNEL_OBJECTS $<TARGET_OBJECTS:sinkhorn_kernels_${isa}>)
endforeach()

add_library(sinkhorn_kernels STATIC src/kernels/common/executor.cpp src/kernels/cpu/dispatch.cpp
                                    ${SINKHORN_KERNEL_OBJECTS})
target_compile_definitions(sinkhorn_kernels PRIVATE SINKHORN_ISA=baseline)
sinkhorn_kernel_options(sinkhorn_kernels)
target_include_directories(sinkhorn_kernels PUBLIC ${PROJECT_SOURCE_DIR}/src)
