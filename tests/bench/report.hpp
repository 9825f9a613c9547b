// The JSON report of a benchmark: what ran, when, of which revision (KVQ_REVISION) and on which processor.
#pragma once
#include <cjson/cJSON.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>

inline std::string processor() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

// Figures follow; cJSON_Delete is the caller's.
inline cJSON *begin_report(const char *program, int argc, char **argv) {
  std::string command = program;
  for (int i = 1; i < argc; i++) command += std::string(" ") + argv[i];
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  const char *revision = std::getenv("KVQ_REVISION");
  cJSON *report = cJSON_CreateObject();
  cJSON_AddStringToObject(report, "command", command.c_str());
  cJSON_AddStringToObject(report, "date", date);
  cJSON_AddStringToObject(report, "revision", revision ? revision : "");
  cJSON_AddStringToObject(report, "device", processor().c_str());
  return report;
}

// To a file, if it has a name.
inline void write_report(const cJSON *report, const std::string &path) {
  if (path.empty()) return;
  char *text = cJSON_Print(report);
  std::ofstream(path) << text << '\n';
  cJSON_free(text);
}
