# Instruction sets of src/cpu/kernels_NAME.cpp (attention) and src/util/loops_NAME.cpp (packing): one line per NAME and processor
# family.  Files without a line get the baseline.
#
# Contraction is allowed in attention and nowhere else: its results have a tolerance, bytes have none.
# Only dispatch may call into these files, after it has asked the processor.  What they define must have internal linkage,
# apart from the entry points: the linker keeps one copy of an inline function, and that copy must run everywhere.
set(KVQ_KERNELS_x86_64
  "portable -ffp-contract=fast"
  "avx2    -ffp-contract=fast -mavx2 -mfma -mf16c"
  "avxvnni -ffp-contract=fast -mavx2 -mfma -mf16c -mavxvnni"
  "avx512  -ffp-contract=fast -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512vnni -mgfni"
  "amx     -ffp-contract=fast -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512vnni -mgfni -mamx-tile -mamx-int8")
set(KVQ_LOOPS_x86_64
  "avx2    -mavx2 -mf16c -mfma"
  "avx512  -mavx2 -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl")
set(KVQ_KERNELS_aarch64
  "portable -ffp-contract=fast"
  "neon    -ffp-contract=fast -march=armv8.2-a+dotprod+fp16")

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" kvq_processor)
string(REPLACE "amd64" "x86_64" kvq_processor "${kvq_processor}")
string(REPLACE "arm64" "aarch64" kvq_processor "${kvq_processor}")

# GCC clears structs of a few cache lines by `rep stos`, which takes 30 cycles to begin, several times a page.
if(kvq_processor STREQUAL "x86_64" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(kvq_objects PRIVATE -mmemset-strategy=unrolled_loop:512:noalign,libcall:-1:noalign)
endif()

# Under the address sanitizer: its checks as calls, and without those of null pointers that it makes itself.  Checks written out take
# three times as long to compile here, and run no faster.
set(KVQ_KERNELS_sanitized "")
if(KVQ_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  set(KVQ_KERNELS_sanitized --param asan-instrumentation-with-call-threshold=0 -fno-sanitize=null,object-size)
endif()

function(kvq_set_flags lines path)
  foreach(line IN LISTS ${lines})
    separate_arguments(flags UNIX_COMMAND "${line}")
    list(POP_FRONT flags name)
    foreach(source IN LISTS ARGN)
      if(source MATCHES "/src/${path}_${name}\\.cpp$")
        set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${flags};${KVQ_KERNELS_sanitized}")
      endif()
    endforeach()
  endforeach()
endfunction()

function(kvq_set_kernel_flags)
  kvq_set_flags(KVQ_KERNELS_${kvq_processor} cpu/kernels ${ARGN})
  kvq_set_flags(KVQ_LOOPS_${kvq_processor} util/loops ${ARGN})
endfunction()
