// What adapters add; see f32_low_rank.h.
#include "../f32_low_rank.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::neon {

void AddLowRank(const float* const* h, float* const* y, int64_t count, const bf16* b, int64_t rank, int64_t N, int64_t width) {
  F32LowRank<Lanes>::Add(h, y, count, b, rank, N, width);
}

}  // namespace jpaged::neon
