// Mamba-2's scan in f32, on any level; see mamba2.h.
#pragma once

#include "mamba2.h"

namespace jpaged {

template <typename L>
class F32Scan {
 public:
  static void StepRows(const ScanProblem& p, int64_t row, int64_t head, int64_t first) {
    int64_t begin = p.starts[row], end = p.starts[row + 1], count = std::min(kStateRows, p.P - first);
    if (begin == end) return;
    auto of_slot = [&](int64_t slot) -> float* {
      if (slot < 0 || slot >= p.slots) return nullptr;
      return p.pool + ((slot * p.H + head) * p.P + first) * p.N;
    };
    const float* from = of_slot(p.read[row]);
    float* to = of_slot(p.write[row]);
    static thread_local Memory memory;
    float* state = Scratch<float>(memory, kStateRows * p.N);
    if (from == nullptr) {
      std::fill(state, state + count * p.N, 0.0f);
      from = state;
    }
    int64_t group = head / (p.H / p.G);
    for (int64_t t = begin; t < end; ++t) {
      float* after = t + 1 == end && to != nullptr ? to : state;
      const float *b = p.b + (t * p.G + group) * p.N, *c = p.c + (t * p.G + group) * p.N;
      int64_t at = (t * p.H + head) * p.P + first;
      Floats decay = L::Set(p.decay[t * p.H + head]);
      for (int64_t i = 0; i < count; i += 4) Step(from + i * p.N, after + i * p.N, p.N, decay, p.x + at + i, b, c, p.y + at + i);
      from = after;
    }
  }

 private:
  using Floats = typename L::Floats;

  // Takes a token up into four rows of the state, from `from` to `to`, and writes their outputs.
  static void Step(const float* from, float* to, int64_t N, Floats decay, const float* x, const float* b, const float* c, float* y) {
    Floats of_x[4], out[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) of_x[i] = L::Set(x[i]), out[i] = L::Zero();
    for (int64_t n = 0; n < N; n += L::kCount) {
      Floats key = L::Load(b + n), query = L::Load(c + n);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Floats s = L::Fma(of_x[i], key, L::Mul(decay, L::Load(from + i * N + n)));
        L::Store(to + i * N + n, s);
        out[i] = L::Fma(query, s, out[i]);
      }
    }
    L::PutSums(y, out[0], out[1], out[2], out[3]);
  }
};

}  // namespace jpaged
