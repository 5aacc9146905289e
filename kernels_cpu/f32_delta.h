// The gated delta rule in f32, on any level; see gated_delta.h.
#pragma once

#include <cmath>

#include "gated_delta.h"

namespace jpaged {

template <typename L>
class F32Delta {
 public:
  static void StepColumns(const DeltaProblem& p, int64_t row, int64_t head, int64_t column) {
    int64_t begin = p.starts[row], end = p.starts[row + 1];
    if (begin == end) return;
    auto of_slot = [&](int64_t slot) -> float* {
      if (slot < 0 || slot >= p.slots) return nullptr;
      return p.pool + (slot * p.Hv + head) * p.Dk * p.Dv + column;
    };
    const float* from = of_slot(p.read[row]);
    float* to = of_slot(p.write[row]);
    static thread_local Memory memory;
    float* state = Scratch<float>(memory, p.Dk * kColumns);
    int64_t key_head = head / (p.Hv / p.Hk);
    auto key = [&](const float* x, int64_t t) { return x + (t * p.Hk + key_head) * p.Dk; };
    Floats by_key[kRegisters];  // S^T k of the token that comes next
    Begin(from, p.Dv, key(p.k, begin), p.Dk, state, by_key);
    for (int64_t t = begin; t < end; ++t) {
      bool is_last = t + 1 == end;
      float decay = std::exp(p.g[t * p.Hv + head]);
      Floats change[kRegisters];
      const float* v = p.v + (t * p.Hv + head) * p.Dv + column;
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        Floats error = L::Fnma(L::Set(decay), by_key[i], L::Load(v + i * L::kCount));
        change[i] = L::Mul(L::Set(p.beta[t * p.Hv + head]), error);
      }
      float* o = p.o + (t * p.Hv + head) * p.Dv + column;
      if (!is_last) {
        Step<true>(state, state, kColumns, decay, change, key(p.k, t), key(p.q, t), key(p.k, t + 1), p.Dk, o, by_key);
      } else if (to != nullptr) {
        Step<false>(state, to, p.Dv, decay, change, key(p.k, t), key(p.q, t), nullptr, p.Dk, o, by_key);
      } else {
        Step<false>(state, state, kColumns, decay, change, key(p.k, t), key(p.q, t), nullptr, p.Dk, o, by_key);
      }
    }
  }

 private:
  using Floats = typename L::Floats;
  static constexpr int kRegisters = kColumns / L::kCount;

  // Copies the state to `state`, zeros where there is none, and multiplies it by the first token's key.
  static void Begin(const float* from, int64_t stride, const float* k, int64_t Dk, float* state, Floats (&by_key)[kRegisters]) {
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) by_key[i] = L::Zero();
    for (int64_t c = 0; c < Dk; ++c) {
      Floats of_key = L::Set(k[c]);
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        Floats s = from == nullptr ? L::Zero() : L::Load(from + c * stride + i * L::kCount);
        L::Store(state + c * kColumns + i * L::kCount, s);
        by_key[i] = L::Fma(of_key, s, by_key[i]);
      }
    }
  }

  // Takes a token up into the state, from `state` to `to`, and writes its output. has_next: multiplies the new state by the
  // next token's key too.
  template <bool has_next>
  static void Step(const float* state, float* to, int64_t stride, float decay, const Floats (&change)[kRegisters],
                   const float* k, const float* q, const float* next, int64_t Dk, float* o, Floats (&by_key)[kRegisters]) {
    Floats out[kRegisters], by_next[kRegisters];
    Floats decays = L::Set(decay);
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) out[i] = by_next[i] = L::Zero();
    for (int64_t c = 0; c < Dk; ++c) {
      Floats of_key = L::Set(k[c]), of_query = L::Set(q[c]), of_next = L::Zero();
      if constexpr (has_next) of_next = L::Set(next[c]);
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        Floats s = L::Load(state + c * kColumns + i * L::kCount);
        s = L::Fma(of_key, change[i], L::Mul(decays, s));
        L::Store(to + c * stride + i * L::kCount, s);
        out[i] = L::Fma(of_query, s, out[i]);
        if constexpr (has_next) by_next[i] = L::Fma(of_next, s, by_next[i]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) L::Store(o + i * L::kCount, out[i]);
    if constexpr (has_next) {
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) by_key[i] = by_next[i];
    }
  }
};

}  // namespace jpaged
