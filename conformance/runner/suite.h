/* Run the tests of one vector file on a target. */
#ifndef KVQ_CONFORM_SUITE_H
#define KVQ_CONFORM_SUITE_H

#include "target.h"

typedef struct {
  int level;          /* run tests of at most this level */
  const char *filter; /* only tests whose "suite/group/id" contains this; NULL: all */
} selection;

/* Called for each test that ran; `why` is NULL if it passed. */
typedef void (*reporter)(void *user, const char *name, const char *why);

/* Returns NULL, or why the file cannot be run. */
const char *run_file(const char *path, target *t, const selection *choice, reporter report, void *user);

#endif
