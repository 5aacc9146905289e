// Norms of rows and of heads; see f32_norms.h.
#include "../f32_norms.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::neon {

void NormRows(const NormProblem& p, int64_t first, int64_t last) { F32Norms<Lanes>::NormRows(p, first, last); }
void WriteHeads(const HeadProblem& p, int64_t first, int64_t last) { F32Norms<Lanes>::WriteHeads(p, first, last); }

}  // namespace jpaged::neon
