// Products of packed panels, and attention within groups, with AVX2 and FMA in f32.
#include "../f32_group_attention.h"
#include "../f32_panels.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::avx2 {

void MultiplyPanels(ffi::ThreadPool& pool, const float* x, const float* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E) {
  MultiplyPanelsInF32<Lanes>(pool, x, w, packed, y, T, N, E);
}

void MultiplyPanels(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E) {
  MultiplyPanelsInF32<Lanes>(pool, x, w, packed, y, T, N, E);
}

void AttendGroups(ffi::ThreadPool& pool, const GroupProblem& p) { AttendGroupsInF32<Lanes>(pool, p); }

}  // namespace jpaged::avx2
