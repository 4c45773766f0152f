// Threads that share the items of one call.
#pragma once

#include <cstdint>

namespace kvstrata {

constexpr int MAX_THREADS = 256;

// Call `work(context, item, thread)` for every item in [0, items), on up to `threads` threads, the caller among them;
// 0 <= thread < threads. Items start in order. Returns when all are done. If the pool serves another call, the caller
// does all by itself. Works in a child after fork. `work` must not throw.
void parallel(int threads, int64_t items, void (*work)(void* context, int64_t item, int thread), void* context);

template <class F>
void parallel(int threads, int64_t items, F&& work) {
  parallel(
      threads, items, [](void* context, int64_t item, int thread) { (*static_cast<F*>(context))(item, thread); },
      const_cast<void*>(static_cast<const void*>(&work)));
}

}  // namespace kvstrata
