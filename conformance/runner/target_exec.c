/* An implementation behind a command: one JSON message a line on its stdin, one answer a line on its stdout. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "target.h"

typedef struct {
  target base;
  pid_t child;
  FILE *in, *out;
  char *line;
  size_t line_size;
} exec_target;

static cJSON *exchange(exec_target *t, cJSON *message) {
  char *text = cJSON_PrintUnformatted(message);
  cJSON_Delete(message);
  const int sent = text && fputs(text, t->in) >= 0 && fputc('\n', t->in) >= 0 && !fflush(t->in);
  free(text);
  if (!sent || getline(&t->line, &t->line_size, t->out) < 0) {
    snprintf(t->base.error, sizeof t->base.error, "the command ended or closed its pipes");
    return NULL;
  }
  cJSON *answer = cJSON_Parse(t->line);
  if (!answer) snprintf(t->base.error, sizeof t->base.error, "no JSON: %.200s", t->line);
  return answer;
}

/* {"ok": true}, or {"skip": "why"} if a flag names something that the command does not offer. */
static int exec_begin(target *self, const cJSON *flags) {
  cJSON *message = cJSON_CreateObject();
  cJSON_AddStringToObject(message, "cmd", "begin");
  cJSON_AddItemToObject(message, "flags", flags ? cJSON_Duplicate(flags, 1) : cJSON_CreateArray());
  cJSON *answer = exchange((exec_target *)self, message);
  if (!answer) return BEGIN_BROKEN;
  const cJSON *skip = cJSON_GetObjectItemCaseSensitive(answer, "skip");
  if (cJSON_IsString(skip)) snprintf(self->error, sizeof self->error, "%s", skip->valuestring);
  const int begun = cJSON_IsString(skip) ? BEGIN_SKIP : BEGIN_OK;
  cJSON_Delete(answer);
  return begun;
}

/* Why an answer is none: its own "error", or the lack of a status. */
static void explain(target *self, const cJSON *answer) {
  const cJSON *error = cJSON_GetObjectItemCaseSensitive(answer, "error");
  snprintf(self->error, sizeof self->error, "%s", cJSON_IsString(error) ? error->valuestring : "the answer has no status");
}

static cJSON *exec_step(target *self, const cJSON *step, char status[32]) {
  cJSON *message = cJSON_CreateObject();
  cJSON_AddStringToObject(message, "cmd", "step");
  cJSON *copy = cJSON_Duplicate(step, 1);
  cJSON_DeleteItemFromObject(copy, "expect"); /* an implementation never sees what is expected of it */
  cJSON_DeleteItemFromObject(copy, "status");
  cJSON_AddItemToObject(message, "step", copy);
  cJSON *answer = exchange((exec_target *)self, message);
  const cJSON *name = cJSON_GetObjectItemCaseSensitive(answer, "status"), *detail = cJSON_GetObjectItemCaseSensitive(answer, "detail");
  if (!answer || !cJSON_IsString(name)) {
    if (answer) explain(self, answer);
    cJSON_Delete(answer);
    return NULL;
  }
  snprintf(status, 32, "%s", name->valuestring);
  if (cJSON_IsString(detail)) snprintf(self->error, sizeof self->error, "%s", detail->valuestring);
  cJSON *result = cJSON_DetachItemFromObject(answer, "result");
  cJSON_Delete(answer);
  return result ? result : cJSON_CreateObject();
}

static void exec_close(target *self) {
  exec_target *t = (exec_target *)self;
  if (t->in) fclose(t->in);
  if (t->out) fclose(t->out);
  if (t->child > 0) waitpid(t->child, NULL, 0);
  free(t->line);
  free(t);
}

target *target_open_command(const char *command, char *error, size_t error_size) {
  int to[2], from[2];
  exec_target *t = calloc(1, sizeof *t);
  if (!t || pipe(to) || pipe(from)) {
    snprintf(error, error_size, "cannot make pipes: %s", strerror(errno));
    free(t);
    return NULL;
  }
  signal(SIGPIPE, SIG_IGN); /* a command that dies is a failed test, not the end */
  t->base = (target){.begin = exec_begin, .step = exec_step, .close = exec_close};
  t->child = fork();
  if (t->child == 0) {
    dup2(to[0], 0);
    dup2(from[1], 1);
    close(to[0]), close(to[1]), close(from[0]), close(from[1]);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    _exit(127);
  }
  close(to[0]), close(from[1]);
  t->in = fdopen(to[1], "w");
  t->out = fdopen(from[0], "r");
  return &t->base;
}
