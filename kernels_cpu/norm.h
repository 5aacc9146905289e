// Root mean square norms of rows of bf16. A row's squares are summed in kParts parts, part i of the numbers i, i + kParts, ...; of
// these the second half is added to the first one until there is one. Numbers are rounded where it is written here, the same on
// every level, so a row's bits are its own.
//
// Shapes: x, added, sum, y [T, E]; scale [E]; E in whole 16s.
#pragma once

#include "kernels.h"

namespace jpaged {

constexpr int64_t kParts = 16;

struct NormProblem {
  const bf16 *x = nullptr, *added = nullptr;  // added: what is added to x before it is normed; null: nothing
  const float* scale = nullptr;
  bf16 *sum = nullptr, *y = nullptr;  // sum: x and what is added to it, rounded, where there is something
  int64_t E = 0;
  float eps = 0;
  bool in_f32 = false;  // the scale is applied before numbers are rounded, and else to rounded numbers
};

// Norms the rows [first, last). Each level of processors defines it in its level.cc, by f32_norms.h.
void NormRows(const NormProblem& p, int64_t first, int64_t last);

}  // namespace jpaged
