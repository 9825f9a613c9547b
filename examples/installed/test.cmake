# Install the library into a fresh prefix, then configure, build and run the project beside this file against it.
set(work ${build}/installed)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${build} --prefix ${work}/prefix --component library)
set(ENV{PKG_CONFIG_PATH} ${work}/prefix/${libdir}/pkgconfig)
run(${CMAKE_COMMAND} -S ${source}/installed -B ${work}/build -G ${generator}
  -D CMAKE_PREFIX_PATH=${work}/prefix -D CMAKE_C_COMPILER=${compiler})
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/by_find_package)
run(${work}/build/by_pkg_config)
