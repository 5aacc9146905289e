// The gated delta rule: for each token, S = decay S; d = beta (v - S^T k); S = S + k d^T; o = S^T q, where S [Dk, Dv] is
// the state of a value head, and a decay is of all of it or of a row, a channel of the key. Columns of S do not depend on each other, so that a tile of them stays in the L1 cache from a
// row's first token to its last, and main memory sees it once each way.
//
// A token costs the same work whether it comes alone or among others, and its sums run in one order: bits depend neither on
// the batch nor on where a step begins. Shapes: q, k [T, Hk, Dk], v, o [T, Hv, Dv], decay [T, Hv, Dc], where Dc is
// 1 or Dk, beta [T, Hv], pool [slots, Hv, Dk, Dv].
#pragma once

#include "kernels.h"

namespace jpaged {

struct DeltaProblem {
  const float *q = nullptr, *k = nullptr, *v = nullptr, *decay = nullptr, *beta = nullptr;
  float *pool = nullptr, *o = nullptr;
  // Of each row: where its tokens begin, of S rows and one past the last; the slot that holds the state before them (none:
  // zeros); the slot that takes the state after them (none: it is dropped). No slot is any below 0 or from `slots` on.
  const int32_t *starts = nullptr, *read = nullptr, *write = nullptr;
  int64_t slots = 0, Hk = 0, Hv = 0, Dk = 0, Dv = 0, Dc = 0;
};

constexpr int64_t kColumns = 32;  // of a tile; Dv is a multiple

// All tokens of a row, for the columns [column, column + kColumns) of a value head's state. Each level of processors defines
// this in its level.cc.
void StepColumns(const DeltaProblem& p, int64_t row, int64_t head, int64_t column);

}  // namespace jpaged
