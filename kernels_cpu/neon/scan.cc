// Mamba-2's scan; see f32_scan.h.
#include "../f32_scan.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::neon {

void StepRows(const ScanProblem& p, int64_t row, int64_t head, int64_t first) {
  F32Scan<Lanes>::StepRows(p, row, head, first);
}

}  // namespace jpaged::neon
