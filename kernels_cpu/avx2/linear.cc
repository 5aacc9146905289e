// Products with AVX2 and FMA; see linear.h.
#include "../linear.h"

#include "products.h"

namespace jpaged {
namespace {

template <typename Out>
void MultiplyAny(ffi::ThreadPool& pool, const bf16* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  if (T == 0) return;
  int64_t groups = (N + kCols - 1) / kCols;
  // Several items a thread: one that begins late is not waited for long.
  int64_t items = std::clamp<int64_t>(8 * pool.num_threads(), 1, (groups + 3) / 4);
  ParallelFor(pool, items, [&](int64_t item) {
    auto from = [&](int64_t t) { return x + t * E; };
    auto to = [&](int64_t t) { return y + t * N; };
    MultiplyGroups(from, to, T, w, N, E, groups * item / items, groups * (item + 1) / items);
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
