// Statuses have names, whatever number is asked for.
#include <catch2/catch_test_macros.hpp>
#include <cstdint>
#include <cstring>
#include <string>

#include "kvq/kvq.h"
#include "random.hpp"

TEST_CASE("every status of the header has a name of its own") {
  const struct {
    int32_t status;
    const char *name;
  } statuses[] = {{KVQ_OK, "OK"},
                  {KVQ_E_INVALID, "INVALID"},
                  {KVQ_E_SIZE, "SIZE"},
                  {KVQ_E_NONFINITE, "NONFINITE"},
                  {KVQ_E_STATE, "STATE"},
                  {KVQ_E_STALE, "STALE"},
                  {KVQ_E_BUSY, "BUSY"},
                  {KVQ_E_NOMEM, "NOMEM"},
                  {KVQ_E_FULL, "FULL"},
                  {KVQ_E_CORRUPT, "CORRUPT"},
                  {KVQ_E_CONFIG, "CONFIG"},
                  {KVQ_E_DEVICE, "DEVICE"},
                  {KVQ_E_UNSUPPORTED, "UNSUPPORTED"},
                  {KVQ_E_INTERNAL, "INTERNAL"}};
  for (const auto &[status, name] : statuses) CHECK(std::string(kvq_status_string(status)) == name);
}

TEST_CASE("any other number is UNKNOWN and never NULL") {
  for (int32_t status : {1, -1, -9, -13, -99, INT32_MAX, INT32_MIN}) CHECK(std::string(kvq_status_string(status)) == "UNKNOWN");
  kvq_test::Random random;
  for (int i = 0; i < 100000; ++i) REQUIRE(kvq_status_string(static_cast<int32_t>(random.bits())) != nullptr);
}
