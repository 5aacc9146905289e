// From a layer's first product to its attention: queries and keys are normed and rotated, keys and values are written to their
// slots of the pool. Numbers are rounded where it is written here, the same on every level, so a token's bits are its own.
//
// Shapes: qkv [T, K, G + 2, D], of each KV head its queries, key and value; q [T, K * G, D]; pool [L*N, P, 2 * K, D] (K0, V0,
// K1, V1, ...); D in whole 32s. All are bf16.
#pragma once

#include "norm.h"

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

// Writes a row, normed where there is a scale, and rotated.
inline void PrepareHead(const HeadProblem& p, int64_t token, const bf16* __restrict from, const float* scale, bf16* __restrict to) {
  static thread_local Memory memory;
  float* x = Scratch<float>(memory, p.D);
  for (int64_t d = 0; d < p.D; ++d) x[d] = FromBf16(from[d]);
  if (scale != nullptr) NormRow(scale, p.D, p.eps, p.in_f32, x);
  const float *__restrict a = x, *__restrict b = x + p.half;
  const float *__restrict cos = p.cos + token * p.half, *__restrict sin = p.sin + token * p.half;
  for (int64_t i = 0; i < p.half; ++i) {
    to[i] = ToBf16(a[i] * cos[i] - b[i] * sin[i]), to[p.half + i] = ToBf16(b[i] * cos[i] + a[i] * sin[i]);
  }
  for (int64_t d = 2 * p.half; d < p.D; ++d) to[d] = ToBf16(x[d]);
}

// Prepares the heads of one token.
inline void WriteHeads(const HeadProblem& p, int64_t token) {
  int64_t slot = p.slots[token];
  bool is_kept = slot >= 0 && slot < p.slots_of_layer;
  for (int64_t k = 0; k < p.K; ++k) {
    const bf16* from = p.qkv + (token * p.K + k) * (p.G + 2) * p.D;
    for (int64_t g = 0; g < p.G; ++g, from += p.D) PrepareHead(p, token, from, p.q_scale, p.q + ((token * p.K + k) * p.G + g) * p.D);
    if (!is_kept) continue;
    bf16* to = p.pool + ((p.first_slot + slot) * 2 * p.K + 2 * k) * p.D;
    PrepareHead(p, token, from, p.k_scale, to);
    std::memcpy(to + p.D, from + p.D, p.D * sizeof(bf16));
  }
}

}  // namespace jpaged
