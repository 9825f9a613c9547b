// Any text as a recipe: a status, never a crash; and what is printed must parse to itself.
#include <cstdlib>
#include <string>

#include "kvq/kvq.h"

extern const char *const kvq_fuzz_seeds[];
const char *const kvq_fuzz_seeds[] = {"kvq-3", "kvq-2;sinks=4", "kivi-2-g32", "pnmix", "semkv", "blockgtq-k3v3-fast", "tq-split",
                                      "k=lloyd(levels=8,scale=ls,params=e5m3);v=affine-token(levels=4,group=D);sinks=4;recent=32;block=64",
                                      "k=pair-mix(low=1,high=3,midpoint=1,group=128);v=lloyd(levels=4);policy=pnmix(r=1/2,criterion=qk-pair)",
                                      nullptr};

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const std::string text(reinterpret_cast<const char *>(data), size);
  kvq_layer layer{};
  layer.struct_size = sizeof layer;
  layer.kv_heads = 2, layer.q_heads = 4, layer.dim_k = 128;
  char canonical[8192], again[8192];
  if (kvq_recipe_parse(text.c_str(), &layer, 1, canonical, sizeof canonical, nullptr) != KVQ_OK) return 0;
  if (kvq_recipe_parse(canonical, &layer, 1, again, sizeof again, nullptr) != KVQ_OK) std::abort();
  if (std::string(canonical) != again) std::abort();
  kvq_account account{};
  account.struct_size = sizeof account;
  kvq_recipe_account(text.c_str(), &layer, 1, 1000, nullptr, &account);
  return 0;
}
