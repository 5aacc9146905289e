// The second product of what adapters add; see low_rank.cc. An element's sum runs in one order whatever else is computed.
#pragma once

#include "kernels.h"

namespace jpaged {

// y[t][n] += the sum over r of h[t][r] * b[r * N + n], for `count` tokens and n < width. b is bf16 [rank, N]. Each level of
// processors defines this in its level.cc.
void AddLowRank(const float* const* h, float* const* y, int64_t count, const bf16* b, int64_t rank, int64_t N, int64_t width);

}  // namespace jpaged
