/* What is tested: something that executes the steps of a test (SPEC section 10) and answers with a status and results.
 * Results have the keys and encodings of `expect`, whether they come from a C library or from a process that speaks JSON lines. */
#ifndef KVQ_CONFORM_TARGET_H
#define KVQ_CONFORM_TARGET_H

#include <cjson/cJSON.h>

typedef struct target target;
struct target {
  /* Forget all state; a new test begins.  0, or -1 with `error` filled. */
  int (*begin)(target *self, const cJSON *flags);
  /* Execute one step.  Returns the results (to be deleted by the caller) and the status name; NULL with `error` filled if the target
   * broke: no answer, or one that is no JSON. */
  cJSON *(*step)(target *self, const cJSON *step, char status[32]);
  void (*close)(target *self);
  char error[512];
};

target *target_open_library(const char *path, const char *backend, char *error, size_t error_size);
target *target_open_command(const char *command, char *error, size_t error_size);

/* Level 0: what any libkvq of this ABI exports and answers.  Returns the number of checks; `failed` counts those that failed, and
 * each failure is reported. */
int check_abi(const char *library, int *failed, void (*report)(const char *name, const char *message));

#endif
