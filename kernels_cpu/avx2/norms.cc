// Norms of rows and of heads; see f32_norms.h.
#include "../f32_norms.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::avx2 {

void NormRow(const bf16* from, const float* scale, int64_t D, float eps, bool in_f32, bf16* to) {
  F32Norms<Lanes>::NormRow(from, scale, D, eps, in_f32, to);
}
void WriteHeads(const HeadProblem& p, int64_t token) { F32Norms<Lanes>::WriteHeads(p, token); }

}  // namespace jpaged::avx2
