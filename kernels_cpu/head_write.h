// From a layer's first product to its attention: queries and keys are normed (norm.h) and rotated, keys and values are written to
// their slots of the pool. Normed numbers are rounded, and then what becomes of them by the rotation, in which a product and a
// product are added without more precision. This is the same on every level, so a token's bits are its own.
//
// Shapes: qkv [T, K, G + 2, D], of each KV head its queries, key and value; q [T, K * G, D]; pool [L*N, P, 2 * K, D] (K0, V0,
// K1, V1, ...); D in whole 32s. All are bf16.
#pragma once

#include "kernels.h"

namespace jpaged {

struct HeadProblem {
  const bf16* qkv = nullptr;
  bf16 *q = nullptr, *pool = nullptr;
  const int32_t* slots = nullptr;            // of each token; outside [0, slots_of_layer) its key and value are dropped
  const float *q_scale = nullptr, *k_scale = nullptr;  // [D], what normed numbers are multiplied by; null: there is no norm
  const float *cos = nullptr, *sin = nullptr;          // [T, half] of pairs (i, i + half)
  int64_t K = 0, G = 0, D = 0, half = 0, first_slot = 0, slots_of_layer = 0;
  float eps = 0;
  bool in_f32 = false;
};

// Prepares the heads of the tokens [first, last). Each level of processors defines it in its level.cc, by f32_norms.h.
void WriteHeads(const HeadProblem& p, int64_t first, int64_t last);

}  // namespace jpaged
