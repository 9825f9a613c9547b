# The CUDA backend as objects of the same library.  cudart is linked statically: the library loads without a driver.
#
# Every kernel is compiled without contraction and flushes nothing: encoders share headers with src/codec, and fma() is written
# out where attention wants it.
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${KVQ_CUDA_ARCHITECTURES})
endif()
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_EXTENSIONS OFF)

file(GLOB kvq_cuda_sources CONFIGURE_DEPENDS cuda/*.cu)
add_library(kvq_cuda OBJECT ${kvq_cuda_sources})
set_target_properties(kvq_cuda PROPERTIES
  POSITION_INDEPENDENT_CODE ON CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
  CUDA_ARCHITECTURES "${KVQ_CUDA_ARCHITECTURES}")
target_include_directories(kvq_cuda PRIVATE ${PROJECT_SOURCE_DIR} include src)
target_compile_options(kvq_cuda PRIVATE
  --expt-relaxed-constexpr -fmad=false -ftz=false -prec-div=true -prec-sqrt=true
  -Xcompiler=-Wall,-Wextra,-ffp-contract=off,-fno-math-errno
  $<$<CXX_COMPILER_ID:GNU>:-Xcompiler=-fno-gnu-unique>
  $<$<BOOL:${KVQ_WERROR}>:-Xcompiler=-Werror>)

get_filename_component(kvq_cuda_root ${CMAKE_CUDA_COMPILER} DIRECTORY)
find_library(KVQ_CUDART cudart_static REQUIRED
  HINTS ${kvq_cuda_root}/../lib64 ${kvq_cuda_root}/../lib ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES})
add_library(kvq_cudart INTERFACE)
target_link_libraries(kvq_cudart INTERFACE ${KVQ_CUDART} ${CMAKE_DL_LIBS} rt Threads::Threads)

# The one file outside cuda/ that knows whether there is this backend: all others are the same objects with and without it.
set_source_files_properties(src/capi/devices.cpp PROPERTIES
  COMPILE_DEFINITIONS KVQ_WITH_CUDA=1 INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR})
target_sources(kvq_objects INTERFACE $<TARGET_OBJECTS:kvq_cuda>)  # for tests that link the objects
target_link_libraries(kvq_objects INTERFACE kvq_cudart)
