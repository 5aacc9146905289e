// Products of plain weights with AVX-512 bf16.
#include "../bf16_weights.h"
#include "bf16_products.h"
#include "level.h"

namespace jpaged::avx512 {
namespace {

using namespace bf16_products;

constexpr int64_t kStripBytes = 192 * 1024;  // of an expert's weight

// x in tiles, in memory of this thread until it packs another.
const bf16* Pack(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E) {
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, (T + kRows - 1) / kRows * kRows * E);
  auto from = [&](int64_t t) { return x + t * E; };
  // One thread packs few rows before another could wake up; to pack many would take it a fiftieth of the product.
  int64_t at_once = std::max(kRows, kPanel / E / kRows * kRows);
  ParallelFor(pool, (T + at_once - 1) / at_once, [&](int64_t item) {
    for (int64_t t = item * at_once; t < std::min(T, (item + 1) * at_once); t += kRows) {
      PackRows(from, t, std::min(kRows, T - t), packed + t * E, E);
    }
  });
  return packed;
}

template <typename Out>
void MultiplyTo(ffi::ThreadPool& pool, const bf16* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  if (T == 0) return;
  const bf16* packed = Pack(pool, x, T, E);
  auto to = [&](int64_t t) { return y + t * N; };
  int64_t groups = (N + kCols - 1) / kCols, items = SharesOf(pool, groups, 4);
  ParallelFor(pool, items, [&](int64_t item) {
    MultiplyGroups(packed, to, T, w, N, E, groups * item / items, groups * (item + 1) / items);
  });
}

// Rows of x for weights of which a few rows at a time become bf16; see bf16_weights.h.
class Operand {
 public:
  static constexpr int64_t kAtOnce = 5 * kCols;

  Operand(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E) : x_(Pack(pool, x, T, E)), T_(T), E_(E) {}

  void Multiply(const bf16* w, int64_t count, float* y, int64_t stride) const {
    auto to = [&](int64_t t) { return y + t * stride; };
    MultiplyGroups(x_, to, T_, w, count, E_, 0, (count + kCols - 1) / kCols);
  }

 private:
  const bf16* x_;
  int64_t T_, E_;
};
}  // namespace

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E) {
  MultiplyTo(pool, x, w, y, T, N, E);
}

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E) {
  MultiplyTo(pool, x, w, y, T, N, E);
}

void MultiplyPlain(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  MultiplyWidened<Widener, Operand>(pool, x, w, y, T);
}

// The unit of work is a strip of one expert's weight, for all of its tokens.
void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E) {
  std::vector<int64_t> starts;  // of each expert's packed rows, in whole tiles
  int64_t all = 0;
  for (const Expert& expert : experts) {
    starts.push_back(all);
    all += (expert.count + kRows - 1) / kRows * kRows;
  }
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, all * E);
  ParallelFor(pool, experts.size(), [&](int64_t i) {
    int64_t count = experts[i].count;
    auto from = [&](int64_t t) { return pairs.x[experts[i].first + t]; };
    for (int64_t t = 0; t < count; t += kRows) {
      PackRows(from, t, std::min(kRows, count - t), packed + (starts[i] + t) * E, E);
    }
  });
  int64_t groups = (N + kCols - 1) / kCols, of_strip = std::max<int64_t>(1, kStripBytes / (2 * kCols * E));
  int64_t strips = (groups + of_strip - 1) / of_strip;
  ParallelFor(pool, experts.size() * strips, [&](int64_t item) {
    int64_t i = item / strips, strip = item % strips;
    auto to = [&](int64_t t) { return pairs.y[experts[i].first + t]; };
    MultiplyGroups(packed + starts[i] * E, to, experts[i].count, experts[i].w, N, E, groups * strip / strips,
                   groups * (strip + 1) / strips);
  });
}

}  // namespace jpaged::avx512
