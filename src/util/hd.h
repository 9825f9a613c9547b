// KVQ_HD: a function that the CUDA compiler builds for host and device.  The numbers of section 1 and 2 are written once.
#pragma once

#if defined(__CUDACC__)
#define KVQ_HD __host__ __device__
#else
#define KVQ_HD
#endif
