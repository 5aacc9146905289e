// Norms of rows and of heads in f32, on any level; see norm.h and head_write.h.
#pragma once

#include <cmath>

#include "head_write.h"
#include "norm.h"

namespace jpaged {

template <typename L>
class F32Norms {
 public:
  static void NormRow(const bf16* from, const float* scale, int64_t D, float eps, bool in_f32, bf16* to) {
    float factor = 1.0f / std::sqrt(SumOfSquares(from, D) / D + eps);
    auto write = in_f32 ? &Scale<Norm::kInF32> : &Scale<Norm::kRounded>;
    write(from, scale, D, factor, to);
  }

  static void WriteHeads(const HeadProblem& p, int64_t token) {
    auto write = p.q_scale == nullptr ? &Write<Norm::kNone> : p.in_f32 ? &Write<Norm::kInF32> : &Write<Norm::kRounded>;
    write(p, token);
  }

 private:
  using Floats = typename L::Floats;
  enum class Norm { kNone, kRounded, kInF32 };  // kRounded: normed numbers are rounded before they are scaled

  static float SumOfSquares(const bf16* x, int64_t D) {
    constexpr int64_t kRegisters = kParts / L::kCount;
    Floats parts[kRegisters];
    for (Floats& part : parts) part = L::Zero();
    for (int64_t d = 0; d < D; d += kParts) {
      for (int64_t i = 0; i < kRegisters; ++i) {
        Floats number = L::FromBf16(x + d + i * L::kCount);
        parts[i] = L::Add(parts[i], L::Mul(number, number));
      }
    }
    if constexpr (kRegisters == 2) parts[0] = L::Add(parts[0], parts[1]);
    return L::SumOfHalves(parts[0]);
  }

  // A register of normed numbers.
  template <Norm norm>
  static Floats Normed(const bf16* from, const float* scale, Floats factor) {
    Floats x = L::FromBf16(from);
    if constexpr (norm == Norm::kNone) return x;
    x = L::Mul(x, factor);
    if constexpr (norm == Norm::kRounded) x = L::RoundedToBf16(x);
    return L::RoundedToBf16(L::Mul(x, L::Load(scale)));
  }

  template <Norm norm>
  static void Scale(const bf16* from, const float* scale, int64_t D, float factor, bf16* to) {
    Floats all = L::Set(factor);
    for (int64_t d = 0; d < D; d += L::kCount) L::PutRounded(to + d, Normed<norm>(from + d, scale + d, all));
  }

  template <Norm norm>
  static void Write(const HeadProblem& p, int64_t token) {
    static thread_local Memory memory;
    int64_t heads = p.K * (p.G + 1), slot = p.slots[token];  // of queries and keys
    float *factors = Scratch<float>(memory, heads + kParts + p.D), *x = factors + (heads + kParts - 1) / kParts * kParts;
    const bf16* from = p.qkv + token * p.K * (p.G + 2) * p.D;
    if constexpr (norm != Norm::kNone) Factors(p, from, factors);
    bf16* q = p.q + token * p.K * p.G * p.D;
    bf16* kept = slot >= 0 && slot < p.slots_of_layer ? p.pool + (p.first_slot + slot) * 2 * p.K * p.D : nullptr;
    // The next token is brought into the cache meanwhile: products may have written it past the cache.
    auto fetch_next = [&] {
      for (int64_t d = 0; d < p.D; d += kCacheLine / sizeof(bf16)) PrefetchL1(from + p.K * (p.G + 2) * p.D + d);
    };
    for (int64_t k = 0; k < p.K; ++k) {
      for (int64_t g = 0; g < p.G; ++g, from += p.D, q += p.D) {
        fetch_next();
        Prepare<norm>(p, token, from, p.q_scale, *factors++, x, q);
      }
      fetch_next();
      if (kept != nullptr) Prepare<norm>(p, token, from, p.k_scale, *factors, x, kept);
      ++factors, from += p.D;
      fetch_next();
      if (kept != nullptr) std::memcpy(kept + p.D, from, p.D * sizeof(bf16)), kept += 2 * p.D;
      from += p.D;
    }
  }

  // Writes by what to multiply each of a token's queries and keys. All of them before any other work: a head waits long for its
  // sum, a root and two quotients, and others can be summed meanwhile.
  static void Factors(const HeadProblem& p, const bf16* from, float* factors) {
    int64_t heads = p.K * (p.G + 1), head = 0;
    for (int64_t k = 0; k < p.K; ++k, from += p.D) {
      for (int64_t i = 0; i < p.G + 1; ++i, from += p.D) factors[head++] = SumOfSquares(from, p.D);
    }
    std::fill(factors + heads, factors + (heads + kParts - 1) / kParts * kParts, 1.0f);
    for (head = 0; head < heads; head += L::kCount) {
      Floats mean = L::Div(L::Load(factors + head), L::Set(p.D));
      L::Store(factors + head, L::Div(L::Set(1.0f), L::Sqrt(L::Add(mean, L::Set(p.eps)))));
    }
  }

  // Writes a head, normed where there is a scale, and rotated. x: memory for D numbers.
  template <Norm norm>
  static void Prepare(const HeadProblem& p, int64_t token, const bf16* from, const float* scale, float factor, float* x, bf16* to) {
    const int64_t half = p.half, D = p.D;
    const float *cos = p.cos + token * half, *sin = p.sin + token * half;
    Floats all = L::Set(factor);
    auto normed = [&](int64_t d) { return Normed<norm>(from + d, scale + d, all); };
    if (half % L::kCount == 0) {
      for (int64_t i = 0; i < half; i += L::kCount) {
        Floats a = normed(i), b = normed(half + i), c = L::Load(cos + i), s = L::Load(sin + i);
        L::PutRounded(to + i, L::Sub(L::Mul(a, c), L::Mul(b, s)));
        L::PutRounded(to + half + i, L::Add(L::Mul(b, c), L::Mul(a, s)));
      }
      for (int64_t d = 2 * half; d < D; d += L::kCount) L::PutRounded(to + d, normed(d));
    } else {
      for (int64_t d = 0; d < D; d += L::kCount) L::Store(x + d, normed(d));
      const float *a = x, *b = x + half;
      for (int64_t i = 0; i < half; ++i) {
        to[i] = ToBf16(a[i] * cos[i] - b[i] * sin[i]), to[half + i] = ToBf16(b[i] * cos[i] + a[i] * sin[i]);
      }
      for (int64_t d = 2 * half; d < D; ++d) to[d] = ToBf16(x[d]);
    }
  }
};

}  // namespace jpaged
