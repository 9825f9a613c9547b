// A few threads that take numbered items of work; made when first needed.
#pragma once
#include <pthread.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>

#include "util/memory.h"

namespace kvq::cpu {

class Pool {
 public:
  Pool(std::pmr::memory_resource *memory, uint32_t n_threads) : memory_(memory), wanted_(n_threads > 1 ? n_threads : 1) {}
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  uint32_t threads() const { return wanted_; }
  // Make the threads, unless they exist.
  void prepare();
  // Call work(self, item, thread) for every item in [0, items), thread < threads(); the calling thread is number 0 and takes part.
  // Another call that runs meanwhile, or a forked child, works alone.
  void run(uint32_t items, void (*work)(void *self, uint32_t item, uint32_t thread), void *self);

 private:
  struct Worker {
    Pool *pool;
    pthread_t thread;
    uint32_t number;
  };
  static void *enter(void *worker);
  uint32_t make_workers();
  void serve(uint32_t thread);
  void take_items(uint32_t thread);

  std::pmr::memory_resource *memory_;
  const uint32_t wanted_;
  std::atomic<uint32_t> started_{0};  // workers that exist
  std::atomic<pid_t> process_{0};     // where they exist
  Worker *workers_ = nullptr;
  std::atomic<bool> taken_{false};  // a run is in progress

  pthread_mutex_t lock_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t begin_ = PTHREAD_COND_INITIALIZER, end_ = PTHREAD_COND_INITIALIZER;
  // Changed under lock_, looked at without it.
  std::atomic<uint64_t> turn_{0};  // of the current run
  std::atomic<uint32_t> busy_{0};  // workers that have come to this turn and not finished it
  bool open_ = false;              // this turn has work for who comes
  std::atomic<bool> stop_{false};
  void (*work_)(void *, uint32_t, uint32_t) = nullptr;
  void *self_ = nullptr;
  uint32_t items_ = 0;
  std::atomic<uint32_t> next_{0};
};

}  // namespace kvq::cpu
