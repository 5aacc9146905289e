// The gated delta rule; see f32_delta.h.
#include "../f32_delta.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::avx512 {

void StepColumns(const DeltaProblem& p, int64_t row, int64_t head, int64_t column) {
  F32Delta<Lanes>::StepColumns(p, row, head, column);
}

}  // namespace jpaged::avx512
