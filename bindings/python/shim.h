/* Loading libkvq at run time; the functions of kvq.h are defined by the shim and may be called after shim_load. */
#ifndef KVQ_PYTHON_SHIM_H
#define KVQ_PYTHON_SHIM_H

#include <stddef.h>

/* Open the library and find every function of kvq.h in it.  0, or -1 with a sentence in message. */
int shim_load(const char *file, char *message, size_t cap);

#endif
