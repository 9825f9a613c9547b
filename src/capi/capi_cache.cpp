// Caches: creation, counters, policies.
#include "capi/boundary.h"

using namespace kvq;
using namespace kvq::capi;

int32_t kvq_create(const kvq_config *config, kvq_cache **cache) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    Memory scratch;
    ConfigParts read(&scratch);
    KVQ_TRY(read_config(config, &read));
    Cache *made;
    KVQ_TRY(Cache::create(read.config, &made));
    *cache = to(made);
    return KVQ_OK;
  });
}

void kvq_destroy(kvq_cache *cache) { Cache::destroy(from(cache)); }

int32_t kvq_cache_recipe(kvq_cache *cache, char *buf, size_t cap, size_t *needed) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    return write_text(from(cache)->recipe.text, buf, cap, needed);
  });
}

int32_t kvq_stats_get(kvq_cache *cache, kvq_stats *stats) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    KVQ_TRY(check_struct(stats, sizeof *stats, "stats"));
    kvq_stats out{};
    from(cache)->stats(&out);
    write_struct(out, stats);
    return KVQ_OK;
  });
}

// ---- policies

int32_t kvq_calibrate(kvq_cache *cache, const kvq_calibration *data) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    Cache &own = *from(cache);
    kvq_calibration in;
    kvq_tensor k, v, q;
    const kvq_tensor *with_v, *with_q;
    KVQ_TRY(read_struct(data, &in, "data"));
    KVQ_TRY(own.check_layer(in.layer));
    KVQ_TRY(check_tokens("n_tokens", in.n_tokens));
    const LayerShape &shape = own.shapes[in.layer];
    if (in.n_tokens > 0) KVQ_TRY(read_tensor(in.k, "k", in.n_tokens, shape.kv_heads, shape.dim_k, capi::Use::input, &k, place_of(own)));
    KVQ_TRY(read_optional(in.v, "v", in.n_tokens, shape.kv_heads, shape.dim_v, &v, &with_v, place_of(own)));
    KVQ_TRY(read_optional(in.q, "q", in.n_tokens, shape.q_heads, shape.dim_k, &q, &with_q, place_of(own)));
    uint64_t saturated = 0;
    if (with_v) KVQ_TRY(own.backend->check_rows(v, 0, in.n_tokens, shape.kv_heads, shape.dim_v, "v", &saturated));
    return in_layer(in.layer, own.policies->calibrate(in.layer, in.n_tokens, in.n_tokens > 0 ? &k : nullptr, with_q));
  });
}

int32_t kvq_calibrate_finish(kvq_cache *cache) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    return from(cache)->policies->finish_calibration();
  });
}

int32_t kvq_policy_get(kvq_cache *cache, kvq_seq seq, void *buf, size_t cap, size_t *needed) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    Cache &own = *from(cache);
    Vector<uint8_t> blob(&own.memory);
    if (seq == 0) {
      KVQ_TRY(own.policies->get(&blob));
    } else {
      Cache::SequenceUse use;
      KVQ_TRY(own.sequences.use(seq, &use));
      KVQ_TRY(own.get_policy(*use, &blob));
    }
    return write_bytes(blob.data(), blob.size(), buf, cap, needed);
  });
}

int32_t kvq_policy_set(kvq_cache *cache, kvq_seq seq, const void *blob, size_t size) {
  return guarded([&]() -> Status {
    KVQ_REQUIRE(cache);
    KVQ_REQUIRE(blob);
    Cache &own = *from(cache);
    if (seq == 0) return own.policies->set(blob, size);
    Cache::SequenceUse use;
    KVQ_TRY(own.sequences.use(seq, &use));
    return own.set_policy(*use, blob, size);
  });
}
