// Random data of the tests: splitmix64 from one printed seed, so that every run can be repeated on every machine.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace kvq_test {

// The seed of this run: KVQ_TEST_SEED, or 1.
inline uint64_t seed() {
  const char *text = std::getenv("KVQ_TEST_SEED");
  return text ? std::strtoull(text, nullptr, 0) : 1;
}

class Random {
 public:
  // Streams of one seed are independent of each other.
  explicit Random(uint64_t stream = 0) : state_(seed() * 0x9E3779B97F4A7C15u + stream * 0xD1B54A32D192ED03u) {}

  uint64_t bits() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  // In [0, n).
  uint64_t below(uint64_t n) { return bits() % n; }
  // In [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // N(0, 1), Box-Muller.
  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

  std::vector<float> normals(size_t n, double scale = 1, double offset = 0) {
    std::vector<float> values(n);
    for (float &value : values) value = static_cast<float>(offset + scale * normal());
    return values;
  }

  // Keys or values [tokens][heads][dim] whose heads differ in scale and offset: head 0 is N(0, 1), the others 10 N(0, 1) + 3.
  // Identical or zero-mean heads hide faults of strides, head mapping and ranges.
  std::vector<float> rows(size_t tokens, size_t heads, size_t dim, double sign = 1) {
    std::vector<float> values(tokens * heads * dim);
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(sign * ((i / dim) % heads == 0 ? normal() : 10 * normal() + 3));
    return values;
  }

 private:
  uint64_t state_;
};

}  // namespace kvq_test
