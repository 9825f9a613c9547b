// Attention of the CPU backend against float64 over the decoded values, for everything that a page can hold.
#include <cstdlib>

#include "cpu_kit.hpp"

using namespace kvq_test;

namespace {

// A sequence with sinks and a tail in raw pages around `packed` tokens.
void fill(Cache &cache, Random &random, const kvq::PageFormat *format, uint32_t sinks, uint32_t packed, uint32_t tail) {
  const auto rows = [&](uint32_t tokens, uint32_t dim, double sign) { return random.rows(tokens, cache.shape.kv_heads, dim, sign); };
  if (sinks) cache.append(rows(sinks, cache.shape.dim_k, 0.3), rows(sinks, cache.shape.dim_v, -1));
  if (packed) cache.append(rows(packed, cache.shape.dim_k, 0.3), rows(packed, cache.shape.dim_v, -1), format);
  if (tail) cache.append(rows(tail, cache.shape.dim_k, 0.3), rows(tail, cache.shape.dim_v, -1));
}

uint32_t page_tokens_of(uint32_t group) { return (63 / group + 1) * group; }

}  // namespace

TEST_CASE("every codec, as keys and as values, agrees with float64 in every head dimension") {
  Random random(100);
  double worst = 0;
  for (const uint32_t dim : {32u, 64u, 72u, 80u, 96u, 128u, 192u, 256u, 576u}) {
    const std::vector<CodecCase> cases = codec_cases(dim);
    for (size_t i = 0; i < cases.size(); i++) {
      const CodecCase &k = cases[i], &v = cases[(i * 5 + dim) % cases.size()];
      const uint32_t group = std::max(k.group, v.group);
      INFO("dim " << dim << " K " << k.text << " V " << v.text);
      Cache cache(layer_of(2, 2, dim, dim));
      const auto format = cache.format(k.text, v.text, page_tokens_of(group));
      fill(cache, random, format.get(), 3, group == 1 ? 100 : 2 * page_tokens_of(group), 5);
      cache.check(random.normals(cache.shape.q_heads * dim));
      Options two;
      two.queries = 2;
      cache.check(random.normals(2 * cache.shape.q_heads * dim), two);
      worst = std::max(worst, cache.worst_nmse);
    }
  }
  WARN("largest NMSE / max(1, v): " << worst);
}
