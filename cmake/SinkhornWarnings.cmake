# Warnings for our own targets; errors where SINKHORN_WERROR asks for it.
function(sinkhorn_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  # g++ 12 sees overlaps that are none where a literal and a string are added.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
  endif()
  if(SINKHORN_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
