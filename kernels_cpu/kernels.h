// What the CPU kernels share: bf16 as bits, and work divided between the calling thread and XLA's own pool.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jpaged {

namespace ffi = xla::ffi;
using bf16 = uint16_t;

template <size_t rank>
using Bf16 = ffi::Buffer<ffi::BF16, rank>;

template <size_t rank>
using Int32 = ffi::Buffer<ffi::S32, rank>;

template <size_t rank>
using Float32 = ffi::Buffer<ffi::F32, rank>;

template <size_t rank>
inline bf16* Data(Bf16<rank> x) {
  return reinterpret_cast<bf16*>(x.untyped_data());
}

struct alignas(64) Line {  // of the cache
  char bytes[64];
};

// Room for `count` values from the beginning of a cache line on: registers that lie across two cost twice.
template <typename T>
T* Room(std::vector<Line>& memory, int64_t count) {
  size_t lines = (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
  if (memory.size() < lines) memory.resize(lines);  // which fills what is new
  return reinterpret_cast<T*>(memory.data());
}

// Calls body(i) once for each i < items and returns when all calls have. Each thread has a part of the items, which it takes
// in order, so that what it fetches ahead is its own, and then what is left of the others'. The caller works too and waits
// only for calls that have begun, so that a pool whose threads all wait in here makes progress still; a helper that comes
// late finds no item left and touches nothing but `state`.
template <typename Body>
void ParallelFor(ffi::ThreadPool& pool, int64_t items, const Body& body) {
  struct State {
    std::vector<std::atomic<int64_t>> next;
    std::atomic<int64_t> done{0};
  };
  int64_t workers = std::max<int64_t>(1, std::min<int64_t>(items, pool.num_threads()));
  auto state = std::make_shared<State>();
  state->next = std::vector<std::atomic<int64_t>>(workers);
  for (int64_t part = 0; part < workers; ++part) state->next[part] = items * part / workers;
  auto work = [state, items, workers, &body](int64_t worker) {
    for (int64_t part = worker; part < worker + workers; ++part) {
      int64_t end = items * (part % workers + 1) / workers;
      for (int64_t i; (i = state->next[part % workers].fetch_add(1)) < end;) {
        body(i);
        state->done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  for (int64_t worker = 1; worker < workers; ++worker) pool.Schedule([work, worker] { work(worker); });
  work(0);
  for (int spins = 0; state->done.load(std::memory_order_acquire) < items; ++spins) {
    if (spins < 4096) {
      _mm_pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace jpaged
