// As header.c, for C++.
#include "kvq/kvq.h"

int main() {
  uint32_t version = KVQ_VERSION_MAJOR * 10000u + KVQ_VERSION_MINOR * 100u + KVQ_VERSION_PATCH;
  return kvq_version() == version ? 0 : 1;
}
