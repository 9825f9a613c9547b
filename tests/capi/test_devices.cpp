// What the library says of devices: it loads everywhere, and asking for a device that is not there gives a status and a sentence.
#include "mirror.hpp"

using namespace kvq_test;

namespace {

// What creating a cache on a device gives, and what it says.
int32_t create_on(uint32_t backend, uint32_t device, std::string *sentence) {
  const Setup setup;
  kvq_config config = config_of(setup);
  config.backend = backend;
  config.device = device;
  kvq_cache *cache = nullptr;
  const int32_t status = kvq_create(&config, &cache);
  if (status != KVQ_OK) *sentence = detail();
  REQUIRE((cache != nullptr) == (status == KVQ_OK));
  kvq_destroy(cache);
  return status;
}

}  // namespace

TEST_CASE("without a CUDA device the library says so, and the CPU works") {  // X14
  auto info = sized<kvq_backend_info>();
  ok(kvq_backend_query(1, &info));
  REQUIRE(info.backend == KVQ_BACKEND_CUDA);
  std::string sentence;
  const int32_t status = create_on(KVQ_BACKEND_CUDA, 0, &sentence);
  INFO("CUDA: " << sentence << "; " << info.reason);
  if (!KVQ_WITH_CUDA) {
    REQUIRE((status == KVQ_E_UNSUPPORTED && info.available == 0));
  } else if (info.available) {
    REQUIRE(status == KVQ_OK);
  } else {
    REQUIRE((status == KVQ_E_DEVICE && sentence.find("CUDA") != std::string::npos));
  }
  if (!info.available) REQUIRE(std::string(info.reason).size() > 10);

  Setup setup;
  Mirror m(setup);  // and no error stays
  const kvq_seq s = m.create();
  m.commit(s, ids(0, 100));
  m.query(s, 1);
}

TEST_CASE("a device that is not there is refused by its number") {
  std::string sentence;
  REQUIRE(create_on(KVQ_BACKEND_CPU, 1, &sentence) == KVQ_E_DEVICE);
  REQUIRE(sentence.find("device=1") != std::string::npos);
  const int32_t status = create_on(KVQ_BACKEND_CUDA, 1000, &sentence);
  REQUIRE(status == (KVQ_WITH_CUDA ? KVQ_E_DEVICE : KVQ_E_UNSUPPORTED));
}
