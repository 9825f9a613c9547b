// What the library says of devices: it loads everywhere, and asking for a device that is not there gives a status and a sentence.
#include <sstream>

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

TEST_CASE("a cache may ask for one of the CPU's code paths") {
  auto info = sized<kvq_backend_info>();
  ok(kvq_backend_query(0, &info));
  std::istringstream paths(info.paths);
  uint32_t found = 0;
  for (std::string path; paths >> path; found++) {
    Setup setup;
    setup.path = path.c_str();
    Mirror m(setup);  // compares attention with float64
    const kvq_seq s = m.create();
    m.commit(s, ids(0, 200));
    m.query(s, 1);
  }
  REQUIRE(found > 0);
  REQUIRE((" " + std::string(info.paths) + " ").find(" " + std::string(info.path) + " ") != std::string::npos);
  const Setup setup;
  kvq_config config = config_of(setup);
  config.path = "abacus";
  kvq_cache *cache = nullptr;
  config.backend = KVQ_BACKEND_CPU;
  refused(kvq_create(&config, &cache), KVQ_E_UNSUPPORTED);
  REQUIRE(detail().find("abacus") != std::string::npos);
  if (!on_device()) return;
  config.backend = KVQ_BACKEND_CUDA;  // which has no paths
  refused(kvq_create(&config, &cache), KVQ_E_INVALID);
  REQUIRE(detail().find("abacus") != std::string::npos);
}

TEST_CASE("scores in device memory are for caches and builds with a device") {
  const Setup setup{.recipe = "semkv"};
  kvq_config config = config_of(setup);
  config.backend = KVQ_BACKEND_CPU;
  kvq_cache *cache = nullptr;
  kvq_seq seq = 0;
  kvq_step step = 0;
  const uint32_t one = 1;
  ok(kvq_create(&config, &cache));
  ok(kvq_seq_create(cache, &seq));
  refused(kvq_step_begin(cache, &seq, &one, 1, KVQ_STEP_DEVICE_SCORES, &step), KVQ_E_UNSUPPORTED);
  auto prompt = sized<kvq_prefill>();
  prompt.layer = KVQ_ALL_LAYERS, prompt.flags = KVQ_PREFILL_FINAL | KVQ_PREFILL_DEVICE_SCORES;
  refused(kvq_prefill_commit(cache, seq, &prompt, nullptr), KVQ_E_UNSUPPORTED);
  kvq_destroy(cache);
  float score = 7, row[4] = {1, 2, 3, 4};
  auto tensor = sized<kvq_tensor>();
  tensor.data = row, tensor.memory = KVQ_MEMORY_DEVICE;  // it is not
  refused(kvq_scores_hidden(KVQ_SCORE_NORM, &tensor, 1, 1, 4, &score, nullptr), KVQ_WITH_CUDA ? KVQ_E_INVALID : KVQ_E_UNSUPPORTED);
  refused(kvq_scores_random(0, 0, 1, 2, &score, nullptr), KVQ_E_INVALID);
  REQUIRE(score == 7);
}
