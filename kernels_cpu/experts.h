// Products of tokens with the experts that were chosen for them, for bf16 weights [X, N, E] as they lie in memory,
// accumulated in f32. The experts that some token chose are read, and no others. An element's sum runs in one order whatever
// else is computed, so a row's bits depend on it alone. Each level of processors defines MultiplyExperts in its level.cc.
#pragma once

#include <vector>

#include "kernels.h"

namespace jpaged {

// The pairs of token and choice in the order of their experts: pair i takes the row x[i] and gives y[i].
struct Pairs {
  std::vector<const bf16*> x;
  std::vector<float*> y;
};

// One expert: its weight [N, E], and the pairs [first, first + count) that chose it, at least one.
struct Expert {
  const bf16* w;
  int64_t first, count;
};

void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E);

}  // namespace jpaged
