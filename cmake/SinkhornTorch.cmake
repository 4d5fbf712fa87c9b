# Torch as two plain imported libraries, libtorch_cpu and libc10, and its include folders.
#
# find_package(Torch) of a CUDA build insists on a CUDA toolkit; this does not. Torch is found through
# SINKHORN_TORCH (its Python package folder) or by asking SINKHORN_PYTHON.
if(NOT TARGET sinkhorn::torch)
  if(NOT SINKHORN_TORCH)
    if(NOT SINKHORN_PYTHON)
      find_program(SINKHORN_PYTHON NAMES python3 python)
    endif()
    execute_process(
      COMMAND ${SINKHORN_PYTHON} -c "import os, torch; print(os.path.dirname(torch.__file__))"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
    if(failed)
      message(FATAL_ERROR "Torch was not found by ${SINKHORN_PYTHON}; install torch 2.11 or later "
                          "there, or set SINKHORN_TORCH to the folder of its Python package")
    endif()
    set(SINKHORN_TORCH ${found} CACHE PATH "Folder of the torch Python package")
  endif()

  file(STRINGS ${SINKHORN_TORCH}/version.py line REGEX "^__version__")
  string(REGEX MATCH "[0-9]+\\.[0-9]+(\\.[0-9]+)?" SINKHORN_TORCH_VERSION "${line}")
  if(SINKHORN_TORCH_VERSION VERSION_LESS 2.11)
    message(FATAL_ERROR "Torch ${SINKHORN_TORCH_VERSION} in ${SINKHORN_TORCH} is too old; "
                        "2.11 or later is needed")
  endif()
  message(STATUS "Torch ${SINKHORN_TORCH_VERSION} in ${SINKHORN_TORCH}")

  add_library(sinkhorn::torch INTERFACE IMPORTED)
  target_include_directories(sinkhorn::torch SYSTEM INTERFACE
    ${SINKHORN_TORCH}/include ${SINKHORN_TORCH}/include/torch/csrc/api/include)
  target_link_libraries(sinkhorn::torch INTERFACE
    ${SINKHORN_TORCH}/lib/libtorch_cpu.so ${SINKHORN_TORCH}/lib/libc10.so)
  # A CUDA build of libtorch_cpu names CUDA libraries that only its own run path finds.
  target_link_options(sinkhorn::torch INTERFACE -Wl,--allow-shlib-undefined
    -Wl,-rpath,${SINKHORN_TORCH}/lib)
  # Where only libstdc++.a is installed for linking, a library would carry a second copy of the C++
  # library beside Torch's, and crash when the two meet. Name the shared one first.
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so
                  OUTPUT_VARIABLE for_linking OUTPUT_STRIP_TRAILING_WHITESPACE)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=libstdc++.so.6
                  OUTPUT_VARIABLE shared OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT IS_ABSOLUTE "${for_linking}" AND IS_ABSOLUTE "${shared}")
    target_link_libraries(sinkhorn::torch INTERFACE ${shared})
  endif()
  target_compile_features(sinkhorn::torch INTERFACE cxx_std_20)
endif()
