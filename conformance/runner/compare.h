/* Compare the results of a step with what a vector expects, and say what differs. */
#ifndef KVQ_CONFORM_COMPARE_H
#define KVQ_CONFORM_COMPARE_H

#include <cjson/cJSON.h>
#include <stddef.h>

/* 1 if `result` has everything that `expect` names, equal; else 0 and a sentence in `why`. */
int compare_expected(const cJSON *expect, const cJSON *result, char *why, size_t why_size);

#endif
