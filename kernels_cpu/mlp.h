// The feed-forward part of a layer in one call: a product with gate and up, their activation, a product with down; and the
// activation alone, for who adds something to one of the products. All that is computed between two products is added up and
// rounded as it is written here, the same on every level and for any number of rows, so a row's bits are its own.
#pragma once

#include "functions.h"
#include "quantized.h"

namespace jpaged {

enum class Activation { kSilu, kGeluTanh };

// Returns the activation of a gate, times up; NaN of NaN. silu is gate * sigmoid(gate), and gelu_tanh, gate / 2 * (1 + tanh(u /
// 2)), is gate * sigmoid(u).
template <Activation kind>
inline float Gated(float gate, float up) {
  float u = kind == Activation::kSilu ? gate : GeluArgument(gate);
  return gate * Sigmoid(u) * up;
}

template <Activation kind>
void ActivateRow(const float* __restrict gate, const float* __restrict up, bf16* __restrict h, int64_t F) {
  for (int64_t f = 0; f < F; ++f) h[f] = ToBf16(Gated<kind>(gate[f], up[f]));
}

// h [T, F] of gate and up [T, 2, F].
inline void Activate(ffi::ThreadPool& pool, Activation kind, const float* gate_up, bf16* h, int64_t T, int64_t F) {
  constexpr int64_t kAtOnce = 8192;  // numbers that are activated before another thread could begin
  auto activate = kind == Activation::kSilu ? &ActivateRow<Activation::kSilu> : &ActivateRow<Activation::kGeluTanh>;
  int64_t items = SharesOf(pool, T, std::max<int64_t>(1, kAtOnce / std::max<int64_t>(1, F)));
  auto work = [&](int64_t item) {
    for (int64_t t = T * item / items; t < T * (item + 1) / items; ++t) {
      activate(gate_up + 2 * t * F, gate_up + (2 * t + 1) * F, h + t * F, F);
    }
  };
  if (items == 1) return work(0);
  ParallelFor(pool, items, work);
}

// y of x by gate and up [2, F, E] and down [N, F] of bf16, where the level has a way with so many rows that keeps what is between
// the products packed for the second one: the same bits. Returns false where it has none, and nothing is done. Each level of
// processors defines these in its level.cc.
bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, float* y, int64_t T, int64_t N,
         int64_t E, int64_t F);
bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, bf16* y, int64_t T, int64_t N,
         int64_t E, int64_t F);
// The same of gate and up [2 * F, E] and down [N, F] in 8 or 4 bits.
bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const Quantized& gate_up, const Quantized& down, Activations activations,
         float* y, int64_t T);
bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const Quantized& gate_up, const Quantized& down, Activations activations,
         bf16* y, int64_t T);

}  // namespace jpaged
