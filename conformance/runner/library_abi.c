/* Level 0: exports, versions, statuses, struct sizes. */
#include <stdio.h>
#include <string.h>

#include "library.h"

typedef const char *(*abi_check)(const library *lib);

static const char *version_is_consistent(const library *lib) {
  char text[32];
  const unsigned v = lib->version();
  snprintf(text, sizeof text, "%u.%u.%u", v / 10000, v / 100 % 100, v % 100);
  return strcmp(text, lib->version_string()) ? "kvq_version and kvq_version_string differ" : NULL;
}

static const char *statuses_have_names(const library *lib) {
  static const struct {
    int32_t code;
    const char *name;
  } table[] = {{KVQ_OK, "OK"}, {KVQ_E_INVALID, "INVALID"}, {KVQ_E_SIZE, "SIZE"}, {KVQ_E_NONFINITE, "NONFINITE"}, {KVQ_E_STATE, "STATE"}, {KVQ_E_STALE, "STALE"}, {KVQ_E_BUSY, "BUSY"}, {KVQ_E_NOMEM, "NOMEM"}, {KVQ_E_FULL, "FULL"}, {KVQ_E_CORRUPT, "CORRUPT"}, {KVQ_E_CONFIG, "CONFIG"}, {KVQ_E_DEVICE, "DEVICE"}, {KVQ_E_UNSUPPORTED, "UNSUPPORTED"}};
  for (size_t i = 0; i < sizeof table / sizeof *table; i++)
    if (strcmp(lib->status_string(table[i].code), table[i].name)) return table[i].name;
  for (int32_t code = -200; code < 200; code++)
    if (!lib->status_string(code)) return "kvq_status_string gave NULL";
  return NULL;
}

static const char *cpu_is_available(const library *lib) {
  kvq_backend_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  if (lib->backend_query(0, &info)) return "kvq_backend_query(0) failed";
  return info.available && info.backend == KVQ_BACKEND_CPU ? NULL : "backend 0 is not the CPU, or not available";
}

static const char *bad_calls_have_sentences(const library *lib) {
  char detail[512] = "";
  if (lib->create(NULL, NULL) != KVQ_E_INVALID) return "kvq_create(NULL, NULL) is not INVALID";
  if (lib->error_detail(detail, sizeof detail, NULL) || !detail[0]) return "kvq_error_detail says nothing after a failure";
  return NULL;
}

static const char *unknown_tails_are_refused(const library *lib) {
  struct {
    kvq_backend_info info;
    uint8_t tail[16];
  } longer;
  memset(&longer, 0, sizeof longer);
  longer.info.struct_size = sizeof longer;
  if (lib->backend_query(0, &longer.info)) return "a longer struct with a zero tail is refused";
  memset(&longer, 0, sizeof longer);
  longer.info.struct_size = 0;
  return lib->backend_query(0, &longer.info) == KVQ_E_INVALID ? NULL : "struct_size 0 is accepted";
}

static const char *presets_are_listed(const library *lib) {
  uint32_t n = 0;
  while (lib->recipe_preset(n)) n++;
  return n ? NULL : "kvq_recipe_preset lists nothing";
}

int check_abi(const char *path, int *failed, void (*report)(const char *name, const char *message)) {
  static const struct {
    const char *name;
    abi_check check;
  } table[] = {{"abi/version_is_consistent", version_is_consistent}, {"abi/statuses_have_names", statuses_have_names}, {"abi/cpu_is_available", cpu_is_available}, {"abi/bad_calls_have_sentences", bad_calls_have_sentences}, {"abi/unknown_tails_are_refused", unknown_tails_are_refused}, {"abi/presets_are_listed", presets_are_listed}};
  const int n = (int)(sizeof table / sizeof *table);
  library lib;
  const char *wrong = library_open(&lib, path);
  if (wrong) {
    report("abi/exports", wrong);
    *failed = 1;
    library_close(&lib);
    return 1;
  }
  for (int i = 0; i < n; i++) {
    const char *message = table[i].check(&lib);
    if (!message) continue;
    (*failed)++;
    report(table[i].name, message);
  }
  library_close(&lib);
  return n + 1; /* and the exports */
}
