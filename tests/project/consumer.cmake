# Runs tests/consumer against a fresh install tree.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()

set(work ${BUILD}/consumer)
file(REMOVE_RECURSE ${work})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix)
run(${PYTHON} ${SOURCE}/tests/project/readme.py ${SOURCE}/README.md cpp ${work}/example.cpp)
run(${CMAKE_COMMAND} -S ${SOURCE}/tests/consumer -B ${work}/build -G Ninja
    -DCMAKE_MAKE_PROGRAM=${NINJA} -DCMAKE_PREFIX_PATH=${work}/prefix
    -DEXAMPLE=${work}/example.cpp)
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/consumer)
# The installed Python package finds the installed library.
run(${CMAKE_COMMAND} -E env --unset=SINKHORN_BUILD_DIR PYTHONPATH=${work}/prefix/lib/python
    ${PYTHON} -c
    "import sinkhorn, pathlib; assert sinkhorn.library_path.is_relative_to(pathlib.Path('${work}').resolve()), sinkhorn.library_path")
