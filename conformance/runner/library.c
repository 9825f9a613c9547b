#include "library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *library_open(library *lib, const char *path) {
  memset(lib, 0, sizeof *lib);
  lib->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!lib->handle) return dlerror();
  const struct {
    const char *name;
    void *field;
  } table[] = {
#define LIBRARY_ROW(name) {"kvq_" #name, &lib->name},
      LIBRARY_FUNCTIONS(LIBRARY_ROW)
#undef LIBRARY_ROW
  };
  for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
    void *symbol = dlsym(lib->handle, table[i].name);
    if (!symbol) return table[i].name;
    memcpy(table[i].field, &symbol, sizeof symbol); /* ISO C has no cast from void * to a function */
  }
  return NULL;
}

void library_close(library *lib) {
  if (lib->handle) dlclose(lib->handle);
  lib->handle = NULL;
}

int32_t runner_error(library_target *t, const char *what) {
  snprintf(t->base.error, sizeof t->base.error, "%s", what);
  return RUNNER_ERROR;
}

const char *text_field(const cJSON *step, const char *key, const char *missing) {
  const cJSON *v = cJSON_GetObjectItemCaseSensitive(step, key);
  return cJSON_IsString(v) ? v->valuestring : missing;
}

double number_field(const cJSON *step, const char *key, double missing) {
  const cJSON *v = cJSON_GetObjectItemCaseSensitive(step, key);
  return cJSON_IsNumber(v) ? v->valuedouble : missing;
}

uint32_t layout_field(const cJSON *step) {
  return strcmp(text_field(step, "layout", "half"), "adjacent") ? KVQ_ROPE_HALF : KVQ_ROPE_ADJACENT;
}

kvq_tensor tensor_of(const array *a, size_t token_stride, size_t head_stride) {
  kvq_tensor t;
  memset(&t, 0, sizeof t);
  t.struct_size = sizeof t;
  t.dtype = (uint32_t)a->dtype;
  t.data = a->data;
  t.token_stride = (int64_t)token_stride;
  t.head_stride = (int64_t)head_stride;
  return t;
}

/* Flags other than a level name what a library may lack. */
static int library_begin(target *self, const cJSON *flags) {
  const cJSON *flag;
  forget_sequences((library_target *)self);
  cJSON_ArrayForEach(flag, flags) {
    const char *name = cJSON_IsString(flag) ? flag->valuestring : "";
    if (name[0] == 'L' || !strcmp(name, "options")) continue;
    snprintf(self->error, sizeof self->error, "the C ABI has no call for \"%s\"", name);
    return BEGIN_SKIP;
  }
  return BEGIN_OK;
}

static cJSON *library_run(target *self, const cJSON *step, char status[32]) {
  library_target *t = (library_target *)self;
  const char *op = text_field(step, "op", "");
  library_step run = find_stateless_step(op);
  if (!run) run = find_sequence_step(op);
  if (!run) {
    snprintf(self->error, sizeof self->error, "unknown op \"%s\"", op);
    return NULL;
  }
  cJSON *result = cJSON_CreateObject();
  const int32_t code = run(t, step, result);
  if (code == RUNNER_ERROR) {
    cJSON_Delete(result);
    return NULL;
  }
  snprintf(status, 32, "%s", t->lib.status_string(code));
  if (code && !self->error[0]) t->lib.error_detail(self->error, sizeof self->error, NULL);
  return result;
}

static void library_end(target *self) {
  library_target *t = (library_target *)self;
  forget_sequences(t);
  library_close(&t->lib);
  free(t);
}

target *target_open_library(const char *path, const char *backend, char *error, size_t error_size) {
  library_target *t = calloc(1, sizeof *t);
  const char *wrong = t ? library_open(&t->lib, path) : "out of memory";
  if (!wrong && strcmp(backend, "cpu") && strcmp(backend, "cuda")) wrong = "unknown backend";
  if (wrong) {
    snprintf(error, error_size, "%s: %s", path, wrong);
    free(t);
    return NULL;
  }
  t->backend = strcmp(backend, "cuda") ? KVQ_BACKEND_CPU : KVQ_BACKEND_CUDA;
  t->base.begin = library_begin;
  t->base.step = library_run;
  t->base.close = library_end;
  return &t->base;
}
