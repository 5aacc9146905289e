// The gated delta rule in f32, on any level; see gated_delta.h.
#pragma once

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
    auto token = [&](int64_t t) -> Token {
      int64_t at = (t * p.Hk + key_head) * p.Dk;
      return {.q = p.q + at, .k = p.k + at, .decays = p.decay + (t * p.Hv + head) * p.Dc, .stride = p.Dc > 1};
    };
    Floats by_key[kRegisters];  // S^T k of the token that comes next, with S decayed
    Begin(from, p.Dv, token(begin), p.Dk, state, by_key);
    for (int64_t t = begin; t < end; ++t) {
      bool is_last = t + 1 == end;
      Floats change[kRegisters];
      const float* v = p.v + (t * p.Hv + head) * p.Dv + column;
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        Floats error = L::Sub(L::Load(v + i * L::kCount), by_key[i]);
        change[i] = L::Mul(L::Set(p.beta[t * p.Hv + head]), error);
      }
      float* o = p.o + (t * p.Hv + head) * p.Dv + column;
      if (!is_last) {
        Step<true>(state, state, kColumns, token(t), token(t + 1), change, p.Dk, o, by_key);
      } else if (to != nullptr) {
        Step<false>(state, to, p.Dv, token(t), {}, change, p.Dk, o, by_key);
      } else {
        Step<false>(state, state, kColumns, token(t), {}, change, p.Dk, o, by_key);
      }
    }
  }

 private:
  using Floats = typename L::Floats;
  static constexpr int kRegisters = kColumns / L::kCount;

  // A token of a head. stride: of the decays of the state's rows; where it is 0, they share one.
  struct Token {
    const float *q = nullptr, *k = nullptr, *decays = nullptr;
    int64_t stride = 0;
    float decay(int64_t c) const { return decays[c * stride]; }
  };

  // Copies the state to `state`, zeros where there is none, and multiplies it, decayed, by the first token's key.
  static void Begin(const float* from, int64_t stride, const Token& token, int64_t Dk, float* state, Floats (&by_key)[kRegisters]) {
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) by_key[i] = L::Zero();
    for (int64_t c = 0; c < Dk; ++c) {
      Floats of_key = L::Set(token.decay(c) * token.k[c]);
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        Floats s = from == nullptr ? L::Zero() : L::Load(from + c * stride + i * L::kCount);
        L::Store(state + c * kColumns + i * L::kCount, s);
        by_key[i] = L::Fma(of_key, s, by_key[i]);
      }
    }
  }

  // Takes a token up into the state, from `state` to `to`, and writes its output. has_next: multiplies the new state, decayed
  // once more, by the next token's key too.
  template <bool has_next>
  static void Step(const float* state, float* to, int64_t stride, const Token& token, const Token& next,
                   const Floats (&change)[kRegisters], int64_t Dk, float* o, Floats (&by_key)[kRegisters]) {
    Floats out[kRegisters], by_next[kRegisters];
#pragma GCC unroll 4
    for (int i = 0; i < kRegisters; ++i) out[i] = by_next[i] = L::Zero();
    for (int64_t c = 0; c < Dk; ++c) {
      Floats decay = L::Set(token.decay(c)), of_key = L::Set(token.k[c]), of_query = L::Set(token.q[c]), of_next = L::Zero();
      if constexpr (has_next) of_next = L::Set(next.decay(c) * next.k[c]);
#pragma GCC unroll 4
      for (int i = 0; i < kRegisters; ++i) {
        Floats s = L::Load(state + c * kColumns + i * L::kCount);
        s = L::Fma(of_key, change[i], L::Mul(decay, s));
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
