// Scratch memory of one call: a 64-byte aligned part for each thread.
#pragma once

#include <memory>

#include "kernels.h"

namespace kvstrata {

class ThreadScratch {
 public:
  ThreadScratch(int64_t bytes, int64_t threads)
      : part_(round_up(bytes, 64)), memory_(new char[size_t(part_ * threads + 63)]) {}

  char* of(int64_t thread) const {
    return memory_.get() + (-reinterpret_cast<uintptr_t>(memory_.get()) & 63) + part_ * thread;
  }

 private:
  int64_t part_;
  std::unique_ptr<char[]> memory_;
};

}  // namespace kvstrata
