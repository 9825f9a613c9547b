# kvq_cjson: cJSON, for tests and tools.  Debian's libcjson-dev has no CMake package, and pkg-config is not everywhere.
if(NOT TARGET kvq_cjson)
  find_path(KVQ_CJSON_INCLUDE cjson/cJSON.h REQUIRED)
  find_library(KVQ_CJSON_LIBRARY cjson REQUIRED)
  add_library(kvq_cjson INTERFACE IMPORTED GLOBAL)
  target_include_directories(kvq_cjson INTERFACE ${KVQ_CJSON_INCLUDE})
  target_link_libraries(kvq_cjson INTERFACE ${KVQ_CJSON_LIBRARY})
endif()
