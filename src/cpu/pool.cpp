#include "cpu/pool.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>

namespace kvq::cpu {
namespace {

// To sleep and be woken takes 40 us and more, as much as a few thousand tokens of attention: who waits looks around for a while first,
// and lets others have the processor meanwhile.
constexpr std::chrono::microseconds kAwake{200};

template <typename Condition>
void await_awake(Condition condition) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point end = Clock::now() + kAwake;
  while (!condition() && Clock::now() < end) sched_yield();
}

}  // namespace

Pool::~Pool() {
  if (process_.load() == getpid()) {
    pthread_mutex_lock(&lock_);
    stop_ = true;
    pthread_cond_broadcast(&begin_);
    pthread_mutex_unlock(&lock_);
    for (uint32_t i = 0; i < started_; i++) pthread_join(workers_[i].thread, nullptr);
  }
  if (workers_) memory_->deallocate(workers_, sizeof(Worker) * (wanted_ - 1), alignof(Worker));
}

void Pool::prepare() {
  if (wanted_ == 1 || started_.load()) return;
  pthread_mutex_lock(&lock_);
  if (!workers_) {
    try {
      workers_ = static_cast<Worker *>(memory_->allocate(sizeof(Worker) * (wanted_ - 1), alignof(Worker)));
    } catch (...) {
      pthread_mutex_unlock(&lock_);
      throw;
    }
    process_.store(getpid());
    started_.store(make_workers());
  }
  pthread_mutex_unlock(&lock_);
}

// As many workers as the system gives; too few only cost time.  Signals are for the program's own threads.
uint32_t Pool::make_workers() {
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  uint32_t made = 0;
  for (; made < wanted_ - 1; made++) {
    workers_[made].pool = this;
    workers_[made].number = made + 1;
    if (pthread_create(&workers_[made].thread, nullptr, enter, &workers_[made]) != 0) break;
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  return made;
}

void *Pool::enter(void *worker) {
  static_cast<Worker *>(worker)->pool->serve(static_cast<Worker *>(worker)->number);
  return nullptr;
}

void Pool::serve(uint32_t thread) {
  for (uint64_t done = 0;;) {
    await_awake([&] { return stop_ || turn_ != done; });
    pthread_mutex_lock(&lock_);
    while (!stop_ && turn_ == done) pthread_cond_wait(&begin_, &lock_);
    const bool stop = stop_, works = open_ && !stop;
    done = turn_;
    if (works) busy_++;
    pthread_mutex_unlock(&lock_);
    if (stop) return;
    if (!works) continue;
    take_items(thread);
    pthread_mutex_lock(&lock_);
    if (--busy_ == 0) pthread_cond_signal(&end_);
    pthread_mutex_unlock(&lock_);
  }
}

void Pool::take_items(uint32_t thread) {
  for (uint32_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) work_(self_, item, thread);
}

void Pool::run(uint32_t items, void (*work)(void *self, uint32_t item, uint32_t thread), void *self) {
  const bool alone = started_.load() == 0 || items < 2 || process_.load() != getpid() || taken_.exchange(true);
  if (alone) {
    for (uint32_t item = 0; item < items; item++) work(self, item, 0);
    return;
  }
  pthread_mutex_lock(&lock_);
  work_ = work, self_ = self, items_ = items;
  next_.store(0, std::memory_order_relaxed);
  open_ = true;
  turn_++;
  pthread_cond_broadcast(&begin_);
  pthread_mutex_unlock(&lock_);
  take_items(0);
  pthread_mutex_lock(&lock_);
  open_ = false;  // who has not come by now is not waited for
  pthread_mutex_unlock(&lock_);
  await_awake([&] { return busy_ == 0; });
  pthread_mutex_lock(&lock_);
  while (busy_) pthread_cond_wait(&end_, &lock_);
  pthread_mutex_unlock(&lock_);
  taken_.store(false);
}

}  // namespace kvq::cpu
