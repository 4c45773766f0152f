#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvstrata {
namespace {

constexpr int SPINS = 2000;  // some 20-50 us: between the layers of a step; longer starves whoever shares the cores

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#else
  std::this_thread::yield();
#endif
}

class Pool {
 public:
  bool try_run(int threads, int64_t items, void (*work)(void*, int64_t, int), void* context) {
    std::unique_lock<std::mutex> call(calls_, std::try_to_lock);
    if (!call.owns_lock()) return false;
    grow(threads - 1);
    const int helpers = std::min(threads - 1, workers_);
    work_ = work;
    context_ = context;
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    helpers_ = helpers;
    pending_.store(workers_, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(sleep_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    take_items(0);
    for (int spin = 0; pending_.load(std::memory_order_acquire) > 0;) {
      if (++spin < SPINS) {
        pause();
      } else {
        std::this_thread::yield();
      }
    }
    return true;
  }

 private:
  void grow(int workers) {
    while (workers_ < std::min(workers, MAX_THREADS - 1)) {
      try {
        std::thread(&Pool::serve, this, workers_ + 1, generation_.load()).detach();
      } catch (const std::system_error&) {
        return;  // the system gives no more threads: those there do the work
      }
      ++workers_;
    }
  }

  void serve(int thread, uint64_t seen) {
    for (;;) {
      for (int spin = 0; generation_.load(std::memory_order_acquire) == seen; ++spin) {
        if (spin < SPINS) {
          pause();
        } else {
          std::unique_lock<std::mutex> lock(sleep_);
          wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        }
      }
      ++seen;  // a call waits for every worker, so none can miss a generation
      if (thread <= helpers_) take_items(thread);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  void take_items(int thread) {
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) work_(context_, item, thread);
  }

  std::mutex calls_, sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> pending_{0};
  int workers_ = 0, helpers_ = 0;
  void (*work_)(void*, int64_t, int) = nullptr;
  void* context_ = nullptr;
  int64_t items_ = 0;
};

// Never destroyed: its threads may still wait on it when the process ends. A child after fork has none of the threads,
// and perhaps a locked mutex, so it starts a pool of its own.
Pool* pool = [] {
  pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  return new Pool;
}();

}  // namespace

void parallel(int threads, int64_t items, void (*work)(void*, int64_t, int), void* context) {
  threads = int(std::min<int64_t>(threads, items));
  if (threads > 1 && pool->try_run(threads, items, work, context)) return;
  for (int64_t item = 0; item < items; ++item) work(context, item, 0);
}

}  // namespace kvstrata
