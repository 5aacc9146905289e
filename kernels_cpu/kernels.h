// What all CPU kernels share: bf16 as bits, a thread's aligned memory, and a loop whose iterations are divided between the
// calling thread and XLA's own pool. Nothing here depends on the processor.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jpaged {

namespace ffi = xla::ffi;
using bf16 = uint16_t;

struct E4m3 {  // a float8 of 4 bits of exponent and 3 of mantissa, without infinities
  uint8_t bits;
};

constexpr int64_t kCacheLine = 64;  // bytes

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

// Returns the f32 of the same value.
inline float FromBf16(bf16 x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Returns the nearest bf16, the even one of two; NaN stays NaN.
inline bf16 ToBf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
  return ((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded) >> 16;
}

// Brings the cache line of an address into the L1 or the L2 cache. Any address will do: one past the end of an array does
// no harm.
inline void PrefetchL1(const void* address) { __builtin_prefetch(address, 0, 3); }
inline void PrefetchL2(const void* address) { __builtin_prefetch(address, 0, 2); }

// Memory that a thread keeps from one call to the next.
struct alignas(kCacheLine) Line {
  char bytes[kCacheLine];
};
using Memory = std::vector<Line>;

// Returns an array of `count` values at the beginning of a cache line: registers that lie across two lines cost twice. It
// holds whatever was there before.
template <typename T>
T* Scratch(Memory& memory, int64_t count) {
  size_t lines = (count * sizeof(T) + sizeof(Line) - 1) / sizeof(Line);
  if (memory.size() < lines) memory.resize(lines);
  return reinterpret_cast<T*>(memory.data());
}

// Tells the processor that this thread spins.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
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
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
}

// Returns into how many items of work to cut `units`, of at least `least` each: several a thread, so that one that begins
// late is not waited for long.
inline int64_t SharesOf(ffi::ThreadPool& pool, int64_t units, int64_t least) {
  return std::clamp<int64_t>(8 * pool.num_threads(), 1, (units + least - 1) / least);
}

}  // namespace jpaged
