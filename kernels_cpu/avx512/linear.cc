// Products of few rows with AVX-512 bf16; see linear.h.
#include "../linear.h"

#include "products.h"

namespace jpaged {
namespace {

// x in tiles, in memory of this thread until it packs another.
const bf16* Pack(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E) {
  static thread_local std::vector<Line> memory;
  bf16* packed = Room<bf16>(memory, (T + kRows - 1) / kRows * kRows * E);
  auto from = [&](int64_t t) { return x + t * E; };
  // Of few rows one thread packs all before another could wake up; of many it would take a fiftieth of the product.
  int64_t at_once = std::max(kRows, kPanel / E / kRows * kRows);
  ParallelFor(pool, (T + at_once - 1) / at_once, [&](int64_t item) {
    for (int64_t t = item * at_once; t < std::min(T, (item + 1) * at_once); t += kRows) {
      PackRows(from, t, std::min(kRows, T - t), packed + t * E, E);
    }
  });
  return packed;
}

template <typename Out>
void MultiplyAny(ffi::ThreadPool& pool, const bf16* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  if (T == 0) return;
  int64_t groups = (N + kCols - 1) / kCols;
  const bf16* packed = Pack(pool, x, T, E);
  auto to = [&](int64_t t) { return y + t * N; };
  // Several items a thread: one that begins late is not waited for long.
  int64_t items = std::clamp<int64_t>(8 * pool.num_threads(), 1, (groups + 3) / 4);
  ParallelFor(pool, items, [&](int64_t item) {
    MultiplyGroups(packed, to, T, w, N, E, groups * item / items, groups * (item + 1) / items);
  });
}
}  // namespace

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E) {
  MultiplyAny(pool, x, w, y, T, N, E);
}

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E) {
  MultiplyAny(pool, x, w, y, T, N, E);
}
}  // namespace jpaged
