// y = x . w^T in f32 for many rows of x [T, E], as a vision tower has: x and w [N, E] are packed in panels, in which a register
// tile finds what it multiplies side by side. What is bf16 becomes f32 on the way. An element is one sum along E, in order, of
// products that are not rounded, on every level: a row's bits depend on that row alone. Each level of processors defines these
// in its level.cc.
#pragma once

#include "kernels.h"

namespace jpaged {

// Rows of x are packed in panels of a number that divides this.
constexpr int64_t kPanelRows = 12;

// packed: as many floats as x has, its rows rounded up to whole kPanelRows.
void MultiplyPanels(ffi::ThreadPool& pool, const float* x, const float* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E);
void MultiplyPanels(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E);

}  // namespace jpaged
