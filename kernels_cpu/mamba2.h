// Mamba-2's scan: for each token, S = decay S + x b^T; y = S c, where S [P, N] is the state of a head. Rows of S do not depend
// on each other, so that a tile of them stays in the L1 cache from a row's first token to its last, and main memory sees it
// once each way.
//
// A token costs the same work whether it comes alone or among others, and its sums run in one order: bits depend neither on
// the batch nor on where a step begins. Shapes: x, y [T, H, P], decay [T, H], b, c [T, G, N], pool [slots, H, P, N].
#pragma once

#include "kernels.h"

namespace jpaged {

struct ScanProblem {
  const float *x = nullptr, *decay = nullptr, *b = nullptr, *c = nullptr;
  float *pool = nullptr, *y = nullptr;
  // Of each row: where its tokens begin, of S rows and one past the last; the slot that holds the state before them (none:
  // zeros); the slot that takes the state after them (none: it is dropped). No slot is any below 0 or from `slots` on.
  const int32_t *starts = nullptr, *read = nullptr, *write = nullptr;
  int64_t slots = 0, H = 0, G = 0, P = 0, N = 0;
};

constexpr int64_t kStateRows = 16;  // of a tile, or as many as are left of P, a multiple of 4; N is one of 16

// All tokens of a row, for the rows [first, first + kStateRows) of a head's state. Each level of processors defines this in
// its level.cc.
void StepRows(const ScanProblem& p, int64_t row, int64_t head, int64_t first);

}  // namespace jpaged
