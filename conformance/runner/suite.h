/* Run the tests of one vector file on a target. */
#ifndef KVQ_CONFORM_SUITE_H
#define KVQ_CONFORM_SUITE_H

#include "target.h"

typedef struct {
  int level;          /* run tests of at most this level */
  const char *filter; /* only tests whose "suite/group/id" contains this; NULL: all */
} selection;

typedef enum {
  OUTCOME_PASSED = 'P',
  OUTCOME_FAILED = 'F',
  OUTCOME_SKIPPED = 'K'
} outcome;

/* What run_file needs from its caller. */
typedef struct {
  target *(*open)(void *user, char *error, size_t size); /* called when the first test is due; NULL with `error` filled: it failed */
  /* Before a test: NULL as `what`.  After it: its outcome, and why it failed or was skipped. */
  void (*report)(void *user, const char *name, const outcome *what, const char *why);
  void *user;
} run_calls;

/* Returns NULL, or why the file cannot be run. */
const char *run_file(const char *path, const selection *choice, const run_calls *calls);

#endif
