// Root mean square norms of rows of bf16. A row's squares are summed in kParts parts, part i of the numbers i, i + kParts, ...; of
// these the second half is added to the first one until there is one. Numbers are rounded where it is written here, the same on
// every level, so a row's bits are its own.
#pragma once

#include "kernels.h"

namespace jpaged {

constexpr int64_t kParts = 16;

// Norms a row of D numbers, whole 16s. in_f32: the scale [D] is applied before they are rounded, and else to rounded numbers.
// Each level of processors defines it in its level.cc, by f32_norms.h.
void NormRow(const bf16* from, const float* scale, int64_t D, float eps, bool in_f32, bf16* to);

}  // namespace jpaged
