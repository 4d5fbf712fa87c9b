# Warnings for our own targets; errors where SINKHORN_WERROR asks for it.
function(sinkhorn_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra)
  if(SINKHORN_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
