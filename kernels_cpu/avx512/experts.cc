// Experts with AVX-512 bf16; see experts.h. The unit of work is a strip of one expert's weight, for all of its tokens.
#include "../experts.h"

#include "products.h"

namespace jpaged {

constexpr int64_t kStripBytes = 192 * 1024;

void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E) {
  std::vector<int64_t> starts;  // of each expert's packed rows, in whole tiles
  int64_t all = 0;
  for (const Expert& expert : experts) {
    starts.push_back(all);
    all += (expert.count + kRows - 1) / kRows * kRows;
  }
  static thread_local std::vector<Line> memory;
  bf16* packed = Room<bf16>(memory, all * E);
  ParallelFor(pool, experts.size(), [&](int64_t i) {
    int64_t count = experts[i].count;
    auto from = [&](int64_t t) { return pairs.x[experts[i].first + t]; };
    for (int64_t t = 0; t < count; t += kRows) {
      PackRows(from, t, std::min(kRows, count - t), packed + (starts[i] + t) * E, E);
    }
  });
  int64_t groups = (N + kCols - 1) / kCols, each = std::max<int64_t>(1, kStripBytes / (2 * kCols * E));
  int64_t strips = (groups + each - 1) / each;
  ParallelFor(pool, experts.size() * strips, [&](int64_t item) {
    int64_t i = item / strips, strip = item % strips;
    auto to = [&](int64_t t) { return pairs.y[experts[i].first + t]; };
    MultiplyGroups(packed + starts[i] * E, to, experts[i].count, experts[i].w, N, E, groups * strip / strips,
                   groups * (strip + 1) / strips);
  });
}
}  // namespace jpaged
