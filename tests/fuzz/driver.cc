// A small coverage-guided fuzzer for g++: inputs that reach new edges are kept and mutated.
//
//   fuzz_NAME SECONDS          fuzz with KVQ_TEST_SEED
//   fuzz_NAME SECONDS FILE     run one input
//
// Coverage needs the library compiled with -fsanitize-coverage=trace-pc (the `fuzz` tree of ./dev); without it inputs are
// mutated blindly.  The input that is running is written to fuzz_NAME.crash before a sanitizer ends the program.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "random.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
// Inputs to start from: zero-terminated texts, the last entry nullptr.
extern const char *const kvq_fuzz_seeds[];

namespace {

using Input = std::vector<uint8_t>;
uint8_t edges[1 << 16], seen[1 << 16];
uintptr_t previous;
const Input *running;
std::string crash_file;

}  // namespace

extern "C" void __sanitizer_cov_trace_pc() {
  const uintptr_t here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  edges[(here ^ previous) & 0xFFFF] = 1;
  previous = here >> 1;
}

// The sanitizers call this before they end the program.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

void save_crash() {
  if (running) std::ofstream(crash_file, std::ios::binary).write(reinterpret_cast<const char *>(running->data()), running->size());
  std::fprintf(stderr, "the input is in %s\n", crash_file.c_str());
}

// True if the input reaches an edge that no input reached before.
bool run(const Input &input) {
  std::fill(std::begin(edges), std::end(edges), 0);
  previous = 0;
  running = &input;
  LLVMFuzzerTestOneInput(input.data(), input.size());
  running = nullptr;
  bool fresh = false;
  for (size_t i = 0; i < sizeof edges; ++i) fresh |= edges[i] > seen[i], seen[i] |= edges[i];
  return fresh;
}

Input mutate(const std::vector<Input> &corpus, kvq_test::Random &random) {
  Input input = corpus[random.below(corpus.size())];
  for (uint64_t n = 1 + random.below(4); n > 0; --n) {
    const size_t at = random.below(input.size() + 1);
    const uint8_t byte = static_cast<uint8_t>(random.bits());
    switch (random.below(6)) {
      case 0:
        input.insert(input.begin() + at, byte);
        break;
      case 1:
        if (at < input.size()) input[at] = byte;
        break;
      case 2:
        if (at < input.size()) input[at] ^= 1 << (byte & 7);
        break;
      case 3:
        if (at < input.size()) input.erase(input.begin() + at, input.begin() + std::min(input.size(), at + 1 + byte % 8));
        break;
      case 4:
        if (at < input.size()) input[at] = "0123456789=,;()/"[byte & 15];
        break;
      default: {  // continue with another input's end
        const Input &other = corpus[random.below(corpus.size())];
        input.resize(at);
        input.insert(input.end(), other.begin() + random.below(other.size() + 1), other.end());
      }
    }
  }
  if (input.size() > 4096) input.resize(4096);
  return input;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc < 2) return std::fprintf(stderr, "usage: %s SECONDS [FILE]\n", argv[0]), 2;
  if (argc > 2) {
    std::ifstream file(argv[2], std::ios::binary);
    run(Input(std::istreambuf_iterator<char>(file), {}));
    return 0;
  }
  crash_file = std::string(argv[0]) + ".crash";
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(save_crash);
  std::printf("KVQ_TEST_SEED=%llu\n", static_cast<unsigned long long>(kvq_test::seed()));

  kvq_test::Random random;
  std::vector<Input> corpus;
  for (const char *const *text = kvq_fuzz_seeds; *text; ++text) {
    corpus.emplace_back(*text, *text + std::char_traits<char>::length(*text));
    run(corpus.back());
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
  uint64_t runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    Input input = mutate(corpus, random);
    if (run(input)) corpus.push_back(std::move(input));
  }
  std::printf("%llu inputs, %zu kept, %td edges\n", static_cast<unsigned long long>(runs), corpus.size(),
              std::count(std::begin(seen), std::end(seen), 1));
}
