// Experts with AVX2 and FMA; see experts.h. The unit of work is a strip of one expert's weight, for all of its tokens.
#include "../experts.h"

#include "products.h"

namespace jpaged {

void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E) {
  int64_t groups = (N + kCols - 1) / kCols, strips = (groups + BlockGroups(E) - 1) / BlockGroups(E);
  ParallelFor(pool, experts.size() * strips, [&](int64_t item) {
    const Expert& expert = experts[item / strips];
    int64_t strip = item % strips;
    auto from = [&](int64_t t) { return pairs.x[expert.first + t]; };
    auto to = [&](int64_t t) { return pairs.y[expert.first + t]; };
    MultiplyGroups(from, to, expert.count, expert.w, N, E, groups * strip / strips, groups * (strip + 1) / strips);
  });
}
}  // namespace jpaged
