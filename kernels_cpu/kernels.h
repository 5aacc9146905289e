// What all CPU kernels share: bf16 as bits, a thread's aligned memory, and a loop whose iterations are divided between the
// calling thread and XLA's own pool. Nothing here depends on the processor. XLA's header is not read here: it takes a compiler a
// second, and only the files that XLA calls need it (calls.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace xla::ffi {
class ThreadPool;
}

namespace jpaged {

namespace ffi = xla::ffi;
using bf16 = uint16_t;

struct E4m3 {  // a float8 of 4 bits of exponent and 3 of mantissa, without infinities
  uint8_t bits;
};

constexpr int64_t kCacheLine = 64;  // bytes

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}
inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Returns the f32 of the same value.
inline float FromBf16(bf16 x) { return FromBits(static_cast<uint32_t>(x) << 16); }

// Returns the nearest bf16, the even one of two; NaN stays NaN.
inline bf16 ToBf16(float x) {
  uint32_t bits = BitsOf(x), rounded = bits + 0x7fff + (bits >> 16 & 1);
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

// Returns this thread's object of a type. Compilers that see a variable to be the thread's own look up its address wherever they
// use it, in the innermost loops too; here they do not see it.
template <typename T>
T& ThreadLocal() {
  static thread_local T object;
  T* address = &object;
  asm("" : "+r"(address));
  return *address;
}

// Of XLA's pool: how many threads it has, and task(data) for one of them to call.
int64_t NumThreads(ffi::ThreadPool& pool);
void Schedule(ffi::ThreadPool& pool, void (*task)(void* data), void* data);

// Calls body(i) once for each i < items and returns when all calls have. Each thread has a part of the items, which it takes
// in order, so that what it fetches ahead is its own, and then what is left of the others'. The caller works too and waits
// only for calls that have begun, so that a pool whose threads all wait in here makes progress still.
void ParallelFor(ffi::ThreadPool& pool, int64_t items, void (*call)(const void* body, int64_t i), const void* body);

template <typename Body>
void ParallelFor(ffi::ThreadPool& pool, int64_t items, const Body& body) {
  ParallelFor(pool, items, [](const void* body, int64_t i) { (*static_cast<const Body*>(body))(i); }, &body);
}

// Returns into how many items of work to cut `units`, of at least `least` each: several a thread, so that one that begins
// late, or is slower, is not waited for long.
inline int64_t SharesOf(ffi::ThreadPool& pool, int64_t units, int64_t least, int64_t a_thread = 8) {
  return std::clamp<int64_t>(a_thread * NumThreads(pool), 1, (units + least - 1) / least);
}

}  // namespace jpaged
