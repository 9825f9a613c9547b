/* kvq-conform: run conformance vectors against a library or a command.
 *
 * Each file runs in a child process with a time limit, so a crash or a hang is a failed test and not the end of the run.  The child
 * reports a line "S name" before a test and "P", "F" or "K" with name and sentence after it: passed, failed, skipped.  A child that
 * ends in between has failed that test. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"
#include "target.h"

typedef struct {
  const char *library, *command, *vectors, *backend, *json;
  selection choice;
  int limit, verbose;
} options;

typedef struct {
  int passed, failed, skipped;
  cJSON *failures;
} totals;

static const char USAGE[] =
    "usage: kvq-conform (--lib PATH | --exec COMMAND) --vectors PATH [options]\n"
    "  --lib PATH        a shared library with the C ABI of kvq.h (opened with dlopen)\n"
    "  --exec COMMAND    a program that answers steps as JSON lines on stdin and stdout\n"
    "  --vectors PATH    a vector file, or a folder: every *.json below it is run, except manifest.json\n"
    "  --level L0..L4    run levels up to this one (L4): L0 ABI, L1 codecs and policies, L2 sequences, L3 attention, L4 snapshots\n"
    "  --backend NAME    cpu (default) or cuda, with --lib\n"
    "  --filter TEXT     only tests whose suite/group/id contains TEXT\n"
    "  --time-limit S    seconds for one file (120)\n"
    "  --json FILE       write the results as JSON\n"
    "  --verbose         print passed tests too\n"
    "Exit status: 0 all passed, 1 a test failed or none ran, 2 wrong usage.\n";

static void fail_test(totals *t, const char *name, const char *why) {
  t->failed++;
  printf("FAILED  %s\n        %s\n", name, why);
  cJSON *entry = cJSON_CreateObject();
  cJSON_AddStringToObject(entry, "test", name);
  cJSON_AddStringToObject(entry, "why", why);
  cJSON_AddItemToArray(t->failures, entry);
}

/* ---- the child */

typedef struct {
  const options *o;
  FILE *pipe_end;
} child_context;

static void write_line(FILE *to, char kind, const char *name, const char *why) {
  char line[1200];
  snprintf(line, sizeof line, "%c %s\t%s", kind, name, why);
  for (char *p = line; *p; p++)
    if (*p == '\n') *p = ' ';
  fprintf(to, "%s\n", line);
  fflush(to);
}

static void child_report(void *user, const char *name, const outcome *what, const char *why) {
  const child_context *c = user;
  write_line(c->pipe_end, what ? (char)*what : 'S', name, why ? why : "");
}

static target *child_open(void *user, char *error, size_t size) {
  const options *o = ((const child_context *)user)->o;
  return o->library ? target_open_library(o->library, o->backend, error, size) : target_open_command(o->command, error, size);
}

static void child(const options *o, const char *path, FILE *pipe_end) {
  child_context context = {o, pipe_end};
  const run_calls calls = {child_open, child_report, &context};
  setpgid(0, 0); /* so that the parent can end what a command leaves behind */
  alarm((unsigned)o->limit);
  const char *wrong = run_file(path, &o->choice, &calls);
  if (wrong) write_line(pipe_end, OUTCOME_FAILED, path, wrong);
  fputs("E\n", pipe_end); /* the file was run to its end */
}

/* ---- the parent */

/* Count one line of the child; `running` is the test that it is in, empty between tests. */
static void count_line(const options *o, char *line, char running[300], totals *all) {
  char *why = strchr(line, '\t');
  if (!why) return;
  *why++ = 0;
  const char *name = line + 2;
  snprintf(running, 300, "%.299s", line[0] == 'S' ? name : "");
  if (line[0] == OUTCOME_FAILED) fail_test(all, name, why);
  if (line[0] == OUTCOME_PASSED) all->passed++;
  if (line[0] == OUTCOME_SKIPPED) all->skipped++;
  if (o->verbose && line[0] == OUTCOME_PASSED) printf("passed  %s\n", name);
  if (o->verbose && line[0] == OUTCOME_SKIPPED) printf("skipped %s\n        %s\n", name, why);
}

static void report_end(int status, const char *running, const char *path, totals *all) {
  char why[500];
  const char *how = !WIFSIGNALED(status) ? "ended" : WTERMSIG(status) == SIGALRM ? "ran past the time limit"
                                                                                 : strsignal(WTERMSIG(status));
  snprintf(why, sizeof why, "the process of %s: %s", path, how);
  fail_test(all, running[0] ? running : path, why);
}

static void run_in_child(const options *o, const char *path, totals *all) {
  int fd[2];
  fflush(stdout);
  if (pipe(fd)) {
    fail_test(all, path, strerror(errno));
    return;
  }
  const pid_t pid = fork();
  if (pid == 0) {
    close(fd[0]);
    fcntl(fd[1], F_SETFD, FD_CLOEXEC); /* a command that hangs must not keep the pipe open */
    FILE *pipe_end = fdopen(fd[1], "w");
    child(o, path, pipe_end);
    fclose(pipe_end);
    _exit(0);
  }
  close(fd[1]);
  FILE *from = fdopen(fd[0], "r");
  char line[1300], running[300] = "";
  int ended = 0, status = 0;
  while (!ended && fgets(line, sizeof line, from)) {
    line[strcspn(line, "\n")] = 0;
    if (line[0] == 'E') ended = 1;
    count_line(o, line, running, all);
  }
  fclose(from);
  waitpid(pid, &status, 0);
  if (!ended) {
    kill(-pid, SIGKILL);
    report_end(status, running, path, all);
  }
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static int is_vector_file(const char *path) {
  const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path, *dot = strrchr(name, '.');
  return name[0] != '.' && dot && !strcmp(dot, ".json") && strcmp(name, "manifest.json");
}

/* All vector files at or below `path`; returns the count. */
static size_t find_files(const char *path, char ***files, size_t count) {
  DIR *d = opendir(path);
  if (!d) {
    if (!is_vector_file(path)) return count;
    *files = realloc(*files, (count + 1) * sizeof **files);
    (*files)[count] = strdup(path);
    return count + 1;
  }
  for (struct dirent *e; (e = readdir(d));) {
    if (e->d_name[0] == '.') continue;
    const size_t size = strlen(path) + strlen(e->d_name) + 2;
    char *below = malloc(size);
    snprintf(below, size, "%s/%s", path, e->d_name);
    count = find_files(below, files, count);
    free(below);
  }
  closedir(d);
  return count;
}

static const char *next_value(int argc, char **argv, int *i) { return *i + 1 < argc ? argv[++*i] : NULL; }

static int parse_options(int argc, char **argv, options *o) {
  const char *level = "L4", *limit = "120";
  const struct {
    const char *name;
    const char **value;
  } table[] = {{"--lib", &o->library}, {"--exec", &o->command}, {"--vectors", &o->vectors}, {"--level", &level}, {"--backend", &o->backend}, {"--filter", &o->choice.filter}, {"--time-limit", &limit}, {"--json", &o->json}};
  for (int i = 1; i < argc; i++) {
    size_t k = 0;
    while (k < sizeof table / sizeof *table && strcmp(argv[i], table[k].name)) k++;
    if (k < sizeof table / sizeof *table) {
      if (!(*table[k].value = next_value(argc, argv, &i))) return fprintf(stderr, "kvq-conform: %s needs a value\n", table[k].name), 0;
    } else if (!strcmp(argv[i], "--verbose")) {
      o->verbose = 1;
    } else {
      if (strcmp(argv[i], "--help")) fprintf(stderr, "kvq-conform: unknown option %s\n", argv[i]);
      return 0;
    }
  }
  o->choice.level = level[0] == 'L' && level[1] >= '0' && level[1] <= '4' && !level[2] ? level[1] - '0' : -1;
  o->limit = atoi(limit);
  if (o->choice.level < 0) return fprintf(stderr, "kvq-conform: --level is L0 to L4, not %s\n", level), 0;
  if (o->limit <= 0) return fprintf(stderr, "kvq-conform: --time-limit is a number of seconds, not %s\n", limit), 0;
  return (o->library != NULL) != (o->command != NULL) && (o->vectors || o->choice.level == 0);
}

static totals *abi_totals; /* check_abi reports through a plain function */
static void abi_report(const char *name, const char *message) { fail_test(abi_totals, name, message); }

static void write_json(const options *o, const totals *all) {
  cJSON *root = cJSON_CreateObject();
  cJSON_AddStringToObject(root, "target", o->library ? o->library : o->command);
  cJSON_AddNumberToObject(root, "level", o->choice.level);
  cJSON_AddNumberToObject(root, "passed", all->passed);
  cJSON_AddNumberToObject(root, "failed", all->failed);
  cJSON_AddNumberToObject(root, "skipped", all->skipped);
  cJSON_AddItemReferenceToObject(root, "failures", all->failures);
  char *text = cJSON_Print(root);
  FILE *f = fopen(o->json, "w");
  if (!f || fputs(text, f) < 0) fprintf(stderr, "kvq-conform: cannot write %s\n", o->json);
  if (f) fclose(f);
  free(text);
  cJSON_Delete(root);
}

int main(int argc, char **argv) {
  options o = {.backend = "cpu"};
  totals all = {0, 0, 0, cJSON_CreateArray()};
  if (!parse_options(argc, argv, &o)) {
    fputs(USAGE, stderr);
    return 2;
  }
  if (o.library && !o.choice.filter) {
    int failed = 0;
    abi_totals = &all;
    all.passed += check_abi(o.library, &failed, abi_report) - failed;
  }
  const int checks = all.passed + all.failed;
  char **files = NULL;
  const size_t n = o.vectors && o.choice.level > 0 ? find_files(o.vectors, &files, 0) : 0;
  if (n) qsort(files, n, sizeof *files, by_name);
  for (size_t i = 0; i < n; i++) {
    run_in_child(&o, files[i], &all);
    free(files[i]);
  }
  free(files);
  const int none = all.passed + all.failed == (o.choice.level > 0 ? checks : 0);
  if (none) printf("no test ran: nothing below %s matches\n", o.vectors ? o.vectors : "(no vectors)");
  if (o.json) write_json(&o, &all);
  printf("%d passed, %d failed, %d skipped\n", all.passed, all.failed, all.skipped);
  cJSON_Delete(all.failures);
  return all.failed || none;
}
