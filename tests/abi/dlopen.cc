// The library as a plug-in: opened and closed many times, and twice in one process.
#include <dlfcn.h>
#include <malloc.h>
#include <unistd.h>

#include <catch2/catch_test_macros.hpp>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "kvq/kvq.h"
#include "random.hpp"

namespace {

namespace fs = std::filesystem;

// A copy of the library, with the functions of a short generation.
struct Library {
  void *handle;
  decltype(&kvq_create) create;
  decltype(&kvq_destroy) destroy;
  decltype(&kvq_seq_create) seq_create;
  decltype(&kvq_prefill_commit) prefill_commit;
  decltype(&kvq_step_begin) step_begin;
  decltype(&kvq_append) append;
  decltype(&kvq_attend) attend;
  decltype(&kvq_step_end) step_end;
  decltype(&kvq_error_detail) error_detail;

  explicit Library(const std::string &file) : handle(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    INFO((handle ? "" : dlerror()));
    REQUIRE(handle);
    find(create, "kvq_create");
    find(destroy, "kvq_destroy");
    find(seq_create, "kvq_seq_create");
    find(prefill_commit, "kvq_prefill_commit");
    find(step_begin, "kvq_step_begin");
    find(append, "kvq_append");
    find(attend, "kvq_attend");
    find(step_end, "kvq_step_end");
    find(error_detail, "kvq_error_detail");
  }
  template <class F>
  void find(F &function, const char *name) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    REQUIRE(function);
  }
  std::string detail() const {
    char text[512] = "";
    error_detail(text, sizeof text, nullptr);
    return text;
  }
};

template <class T>
T sized() {
  T value{};
  value.struct_size = sizeof(T);
  return value;
}

// A prompt of 100 tokens, one step; returns the attention output.
std::vector<float> generate(const Library &kvq, uint32_t n_threads) {
  constexpr uint32_t kHeads = 2, kQueryHeads = 4, kDim = 64, kTokens = 100;
  kvq_test::Random random;
  std::vector<float> rows = random.rows(kTokens, kQueryHeads, kDim), out(kQueryHeads * kDim);

  kvq_layer layer = sized<kvq_layer>();
  layer.kv_heads = kHeads, layer.q_heads = kQueryHeads, layer.dim_k = kDim;
  kvq_config config = sized<kvq_config>();
  config.n_layers = config.n_layer_structs = 1;
  config.layers = &layer;
  config.n_threads = n_threads;
  config.recipe = "tq-3";
  kvq_cache *cache = nullptr;
  kvq_seq seq = 0;
  REQUIRE(kvq.create(&config, &cache) == KVQ_OK);
  REQUIRE(kvq.seq_create(cache, &seq) == KVQ_OK);

  kvq_tensor in = sized<kvq_tensor>(), result = sized<kvq_tensor>();
  in.data = rows.data();
  result.data = out.data();
  kvq_prefill desc = sized<kvq_prefill>();
  desc.flags = KVQ_PREFILL_FINAL;
  desc.n_tokens = kTokens;
  desc.k = desc.v = &in;
  REQUIRE(kvq.prefill_commit(cache, seq, &desc, nullptr) == KVQ_OK);
  kvq_step step = 0;
  const uint32_t one = 1;
  REQUIRE(kvq.step_begin(cache, &seq, &one, 1, 0, &step) == KVQ_OK);
  REQUIRE(kvq.append(cache, step, 0, &in, &in, nullptr, nullptr) == KVQ_OK);
  REQUIRE(kvq.attend(cache, step, 0, &in, &result, nullptr, nullptr, nullptr) == KVQ_OK);
  REQUIRE(kvq.step_end(cache, step, nullptr, nullptr) == KVQ_OK);
  kvq.destroy(cache);
  return out;
}

long threads() {
  return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
}

// The kernel lists a thread for a moment after it has been joined.
bool threads_end_at(long count) {
  for (int i = 0; i < 5000 && threads() > count; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return threads() <= count;
}

// Memory that malloc has handed out and not got back; what it keeps for itself says nothing about leaks.
size_t allocated_bytes() { return mallinfo2().uordblks + mallinfo2().hblkhd; }

bool mapped(const std::string &name) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find(name) != std::string::npos) return true;
  return false;
}

}  // namespace

TEST_CASE("opening, using and closing the library 100 times leaves no thread and no memory behind") {
  // The CUDA runtime in a library that has it keeps a table of what was registered; it has its full size after some hundred openings.
  for (int opening = 0; opening < (KVQ_SANITIZED ? 0 : 1000); ++opening) {
    void *handle = dlopen(KVQ_LIBRARY_FILE, RTLD_NOW | RTLD_LOCAL);
    REQUIRE(handle);
    REQUIRE(dlclose(handle) == 0);
  }
  const auto rounds = [](int count) {
    for (int round = 0; round < count; ++round) {
      const Library kvq(KVQ_LIBRARY_FILE);
      generate(kvq, round % 2 ? 2 : 1);
      REQUIRE(dlclose(kvq.handle) == 0);
      REQUIRE_FALSE(mapped("libkvq"));
    }
  };
  rounds(20);  // a sanitizer's own thread is there by now
  const long threads_before = threads();
  // The C library keeps the stacks of threads that have ended, and with them a library's thread-local memory; how many depends on how
  // fast threads end.  What leaks grows every time.  Under a sanitizer malloc is another, which reports leaks itself.
  bool grows = true;
  for (int attempt = 0; attempt < 5 && grows; ++attempt) {
    const size_t bytes_before = allocated_bytes();
    rounds(80);
    grows = !KVQ_SANITIZED && allocated_bytes() > bytes_before + 1024;
  }
  CHECK_FALSE(grows);
  CHECK(threads_end_at(threads_before));
}

TEST_CASE("two copies of the library live side by side and share nothing") {
  const fs::path copy = fs::temp_directory_path() / ("kvq-copy-" + std::to_string(getpid()) + ".so");
  fs::copy_file(KVQ_LIBRARY_FILE, copy, fs::copy_options::overwrite_existing);
  const Library a(KVQ_LIBRARY_FILE), b(copy);
  fs::remove(copy);
  REQUIRE(reinterpret_cast<void *>(a.create) != reinterpret_cast<void *>(b.create));

  CHECK(generate(a, 1) == generate(b, 1));
  kvq_cache *cache = nullptr;
  REQUIRE(a.create(nullptr, &cache) == KVQ_E_INVALID);
  CHECK_FALSE(a.detail().empty());
  CHECK(b.detail().empty());
  dlclose(a.handle);
  generate(b, 1);
  dlclose(b.handle);
}
