// Calls with tensors in device memory: what they allocate, what they wait for, what they refuse.
#include <atomic>
#include <chrono>
#include <thread>

#include "allocator.hpp"
#include "device_kit.hpp"
#include "mirror.hpp"

using namespace kvq_test;

namespace {

constexpr uint32_t kHeads = 2, kRatio = 4, kDim = 64, kTokens = 3;

struct World {
  explicit World(const char *recipe, const kvq_allocator *allocator = nullptr)
      : setup{.recipe = recipe, .layers = {layer_of(kHeads, kRatio, kDim)}, .allocator = allocator} {
    kvq_config config = config_of(setup);
    config.backend = KVQ_BACKEND_CUDA;
    ok(kvq_create(&config, &cache));
    ok(kvq_seq_create(cache, &seq));
    const Tensor k(random.rows(200, kHeads, kDim), kHeads, kDim), v(random.rows(200, kHeads, kDim), kHeads, kDim);
    const Tensor q(random.rows(200, kHeads * kRatio, kDim), kHeads * kRatio, kDim);
    const Floats scores = random.normals(200);
    auto prompt = sized<kvq_prefill>();
    prompt.n_tokens = 200, prompt.flags = KVQ_PREFILL_FINAL;
    prompt.k = k.view(), prompt.v = v.view(), prompt.q = q.view();
    prompt.scores = scores.data(), prompt.n_scores = 200;
    ok(kvq_prefill_commit(cache, seq, &prompt, nullptr));
    k_new.set(random.rows(kTokens, kHeads, kDim)), v_new.set(random.rows(kTokens, kHeads, kDim));
    q_new.set(random.normals(q_new.n, 0.3));
  }
  ~World() { kvq_destroy(cache); }
  World(const World &) = delete;

  kvq_step begin() {
    kvq_step step = 0;
    ok(kvq_step_begin(cache, &seq, &kTokens, 1, 0, &step));
    return step;
  }
  int32_t append(kvq_step step, const kvq_tensor &k, void *stream = nullptr) {
    const kvq_tensor v = v_new.tensor();
    return kvq_append(cache, step, 0, &k, &v, nullptr, stream);
  }
  int32_t attend(kvq_step step, void *stream = nullptr) {
    const kvq_tensor q = q_new.tensor(), to = out.tensor();
    return kvq_attend(cache, step, 0, &q, &to, nullptr, nullptr, stream);
  }
  Floats result() {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    return out.get();
  }

  Random random{5};
  Setup setup;
  kvq_cache *cache = nullptr;
  kvq_seq seq = 0;
  DeviceFloats k_new{kTokens * kHeads * kDim}, v_new{kTokens * kHeads * kDim}, q_new{kTokens * kHeads * kRatio * kDim},
      out{kTokens * kHeads * kRatio * kDim};
};

// Holds a stream until it is let go.
class Blocked {
 public:
  explicit Blocked(cudaStream_t stream) : stream_(stream) {
    REQUIRE(cudaLaunchHostFunc(stream, [](void *flag) { while (!*static_cast<std::atomic<bool> *>(flag)) std::this_thread::yield(); }, &open_) == cudaSuccess);
  }
  ~Blocked() {
    open_ = true;
    cudaStreamSynchronize(stream_);
  }

 private:
  cudaStream_t stream_;
  std::atomic<bool> open_{false};
};

}  // namespace

TEST_CASE("append and attend with device tensors allocate nothing") {  // X16
  for (const char *recipe : {"tq-3", "kvq-3", "semkv-tq", "polar-2"}) {
    CountingAllocator memory;
    const kvq_allocator callbacks = memory.callbacks();
    World w(recipe, &callbacks);
    for (int round = 0; round < 20; ++round) {
      const kvq_step step = w.begin();
      const uint64_t used = stats(w.cache).bytes_used;
      memory.remaining = 0;
      ok(w.append(step, w.k_new.tensor()));
      for (int i = 0; i < 5; ++i) ok(w.attend(step));
      memory.remaining = INT64_MAX;
      REQUIRE(stats(w.cache).bytes_used == used);  // nor on the device
      ok(kvq_step_abort(w.cache, step));
    }
  }
}

TEST_CASE("append and attend wait for nothing") {  // X15
  World w("tq-3");
  const kvq_step first = w.begin();
  ok(w.append(first, w.k_new.tensor()));
  ok(w.attend(first));
  const Floats expected = w.result();
  ok(kvq_step_abort(w.cache, first));
  cudaStream_t stream;
  REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  for (const cudaStream_t blocked : {stream, cudaStream_t(nullptr)}) {
    const kvq_step step = w.begin();
    w.out.set(Floats(w.out.n, 7.0f));
    {
      Blocked block(blocked);
      ok(w.append(step, w.k_new.tensor(), stream));
      ok(w.attend(step, stream));
      // Work of a stream that is not blocked ends while the default stream still is.
      if (blocked != stream) REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    }
    REQUIRE(same_bits(w.result(), expected));
    ok(kvq_step_abort(w.cache, step));
  }
  REQUIRE(cudaStreamDestroy(stream) == cudaSuccess);
  ok(kvq_seq_truncate(w.cache, w.seq, 100));  // the stream is gone, and nobody asks for it
}

TEST_CASE("a range of heads is refused, and leaves the step as it was; a range of all heads is none") {
  World w("tq-3");
  const kvq_step step = w.begin();
  ok(w.append(step, w.k_new.tensor()));
  ok(w.attend(step));
  const Floats whole = w.result();
  w.out.set(Floats(w.out.n, 7.0f));
  const kvq_tensor q = w.q_new.tensor(), out = w.out.tensor();
  auto options = sized<kvq_attend_options>();
  options.head_count = 1;
  refused(kvq_attend(w.cache, step, 0, &q, &out, nullptr, &options, nullptr), KVQ_E_UNSUPPORTED);
  REQUIRE(detail().find("head_count=1") != std::string::npos);
  REQUIRE(same_bits(w.result(), Floats(w.out.n, 7.0f)));
  options.head_count = kHeads;
  ok(kvq_attend(w.cache, step, 0, &q, &out, nullptr, &options, nullptr));
  REQUIRE(same_bits(w.result(), whole));
  ok(kvq_step_end(w.cache, step, nullptr, nullptr));
}

TEST_CASE("calibration from device memory chooses the widths that the CPU chooses") {
  constexpr uint32_t kLong = 20000, kFirst = 17;
  Random random(6);
  const kvq_layer layer = layer_of(kHeads, kRatio, kDim);
  const Tensor k(random.rows(kLong, kHeads, kDim), kHeads, kDim, KVQ_DTYPE_F16, Lay::head_first);
  const Tensor q(random.rows(kLong, kHeads * kRatio, kDim), kHeads * kRatio, kDim, KVQ_DTYPE_BF16, Lay::padded);
  const DeviceTensor keys(k), queries(q);
  Bytes blobs[2];
  for (uint32_t backend : {KVQ_BACKEND_CPU, KVQ_BACKEND_CUDA}) {
    auto config = sized<kvq_config>();
    config.backend = backend, config.n_layers = config.n_layer_structs = 1, config.layers = &layer, config.recipe = "blockgtq-k3v3";
    kvq_cache *cache = nullptr;
    ok(kvq_create(&config, &cache));
    kvq_tensor parts[] = {backend ? *keys.view() : *k.view(), backend ? *queries.view() : *q.view()};
    auto data = sized<kvq_calibration>();
    data.k = &parts[0], data.q = &parts[1];
    data.n_tokens = kFirst;
    ok(kvq_calibrate(cache, &data));
    for (kvq_tensor &part : parts) part.data = static_cast<uint16_t *>(part.data) + kFirst * part.token_stride;
    data.n_tokens = kLong - kFirst;
    ok(kvq_calibrate(cache, &data));
    ok(kvq_calibrate_finish(cache));
    blobs[backend] = policy_blob(cache, 0);
    kvq_destroy(cache);
  }
  REQUIRE((!blobs[0].empty() && blobs[0] == blobs[1]));
}

TEST_CASE("host memory that is called device memory is refused, and no error stays") {  // X18
  World w("kvq-2.5");
  const Floats rows = w.random.rows(kTokens, kHeads, kDim);
  kvq_tensor wrong = w.k_new.tensor();
  wrong.data = const_cast<float *>(rows.data());
  const kvq_step step = w.begin();
  const int32_t status = w.append(step, wrong);
  if (status != KVQ_OK) {  // some devices read all of the host's memory
    REQUIRE(status == KVQ_E_INVALID);
    REQUIRE(detail().find("memory=DEVICE") != std::string::npos);
    ok(w.append(step, w.k_new.tensor()));
  }
  ok(w.attend(step));
  w.result();
  ok(kvq_step_end(w.cache, step, nullptr, nullptr));
  REQUIRE(lengths(w.cache, w.seq).total == 200 + kTokens);
}
