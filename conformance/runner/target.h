/* What is tested: something that executes the steps of a test (SPEC section 10) and answers with a status and results.
 * Results have the keys and encodings of `expect`, whether they come from a C library or from a process that speaks JSON lines. */
#ifndef KVQ_CONFORM_TARGET_H
#define KVQ_CONFORM_TARGET_H

#include <cjson/cJSON.h>
#include <stddef.h>

enum {
  BEGIN_OK = 0,
  BEGIN_SKIP = 1,
  BEGIN_BROKEN = -1
};

typedef struct target target;
struct target {
  /* Forget all state; a new test begins.  BEGIN_SKIP: a flag names something that is not offered; `error` says what.
   * BEGIN_BROKEN: `error` says why nothing works any more. */
  int (*begin)(target *self, const cJSON *flags);
  /* Execute one step.  Returns the results (to be deleted by the caller) and the status name; NULL with `error` filled if the target
   * broke: no answer, or one that is no JSON.  With a status other than OK `error` may explain it. */
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
