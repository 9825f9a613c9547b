// main of every test program: prints the seed, so that a failure can be run again with KVQ_TEST_SEED.
#include <catch2/catch_session.hpp>
#include <catch2/reporters/catch_reporter_event_listener.hpp>
#include <catch2/reporters/catch_reporter_registrars.hpp>
#include <cstdio>

#include "random.hpp"

namespace {
class PrintSeed : public Catch::EventListenerBase {
 public:
  using EventListenerBase::EventListenerBase;
  void testRunStarting(const Catch::TestRunInfo &) override {
    std::printf("KVQ_TEST_SEED=%llu\n", static_cast<unsigned long long>(kvq_test::seed()));
  }
};
CATCH_REGISTER_LISTENER(PrintSeed)
}  // namespace

int main(int argc, char **argv) { return Catch::Session().run(argc, argv); }
