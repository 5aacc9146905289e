// Norms of rows and of heads in f32, on any level; see norm.h and head_write.h.
#pragma once

#include <cmath>

#include "head_write.h"
#include "norm.h"

namespace jpaged {

template <typename L>
class F32Norms {
 public:
  static void NormRows(const NormProblem& p, int64_t first, int64_t last) {
    static thread_local Memory memory;
    float* scale = Scratch<float>(memory, p.E);
    InPairs(p.scale, p.E, scale);
    auto norm = p.in_f32 ? &NormSome<Norm::kInF32> : &NormSome<Norm::kRounded>;
    for (int64_t t = first; t < last; t += kTogether) norm(p, scale, t, std::min(kTogether, last - t));
  }

  static void WriteHeads(const HeadProblem& p, int64_t token) {
    auto write = p.q_scale == nullptr ? &Write<Norm::kNone> : p.in_f32 ? &Write<Norm::kInF32> : &Write<Norm::kRounded>;
    write(p, token);
  }

 private:
  using Floats = typename L::Floats;
  static constexpr int64_t kRegisters = kParts / L::kCount;
  enum class Norm { kNone, kRounded, kInF32 };  // kRounded: normed numbers are rounded before they are scaled

  static constexpr int64_t kTogether = 4;  // rows that are summed side by side, since an addition waits for the one before
  static constexpr int64_t kPair = 2 * L::kCount;

  // Partial sums of a row's squares.
  class Squares {
   public:
    Squares() {
      for (Floats& part : parts_) part = L::Zero();
    }

    // Adds those of the register i of kParts numbers.
    void Add(int64_t i, Floats x) { parts_[i] = L::Add(parts_[i], L::Mul(x, x)); }

    float Sum() const {
      if constexpr (kRegisters == 2) return L::SumOfHalves(L::Add(parts_[0], parts_[1]));
      return L::SumOfHalves(parts_[0]);
    }

   private:
    Floats parts_[kRegisters];
  };

  static float SumOfSquares(const bf16* x, int64_t D) {
    Squares squares;
    for (int64_t d = 0; d < D; d += kParts) {
      for (int64_t i = 0; i < kRegisters; ++i) squares.Add(i, L::FromBf16(x + d + i * L::kCount));
    }
    return squares.Sum();
  }

  // Norms `count` rows from row t on. scale: as InPairs writes it.
  template <Norm norm>
  static void NormSome(const NormProblem& p, const float* scale, int64_t t, int64_t count) {
    float sums[kTogether];
    if (count == kTogether) {
      p.added != nullptr ? SumRows<kTogether, true>(p, t, sums) : SumRows<kTogether, false>(p, t, sums);
    } else {
      for (int64_t i = 0; i < count; ++i) p.added != nullptr ? SumRows<1, true>(p, t + i, sums + i) : SumRows<1, false>(p, t + i, sums + i);
    }
    const bf16* from = (p.added != nullptr ? p.sum : p.x) + t * p.E;
    for (int64_t i = 0; i < count; ++i) {
      Scale<norm>(from + i * p.E, scale, p.E, 1.0f / std::sqrt(sums[i] / p.E + p.eps), p.y + (t + i) * p.E);
    }
  }

  // Sums the squares of kRows rows, to which others are added first.
  template <int64_t kRows, bool kAdds>
  static void SumRows(const NormProblem& p, int64_t t, float* sums) {
    Squares squares[kRows];
    int64_t d = 0;
    for (; d + kPair <= p.E; d += kPair) {
#pragma GCC unroll 4
      for (int64_t row = 0; row < kRows; ++row) {
        Floats x[2];
        Pair<kAdds>(p, (t + row) * p.E + d, x);
        squares[row].Add(0, x[0]), squares[row].Add(kRegisters - 1, x[1]);
      }
    }
    if (d < p.E) {
      for (int64_t row = 0; row < kRows; ++row) squares[row].Add(0, One<kAdds>(p, (t + row) * p.E + d));
    }
    for (int64_t row = 0; row < kRows; ++row) sums[row] = squares[row].Sum();
  }

  // Returns kPair numbers from the i-th one on, in their own order. kAdds: others are added first.
  template <bool kAdds>
  [[gnu::always_inline]] static void Pair(const NormProblem& p, int64_t i, Floats (&x)[2]) {
    if constexpr (kAdds) {
      Floats even, odd, even_added, odd_added;
      L::EvenOdd(p.x + i, even, odd), L::EvenOdd(p.added + i, even_added, odd_added);
      even = L::RoundedToBf16(L::Add(even, even_added)), odd = L::RoundedToBf16(L::Add(odd, odd_added));
      L::PutExact(p.sum + i, even, odd);
      L::InOrder(even, odd, x);
    } else {
      x[0] = L::FromBf16(p.x + i), x[1] = L::FromBf16(p.x + i + L::kCount);
    }
  }

  // The same of a register.
  template <bool kAdds>
  static Floats One(const NormProblem& p, int64_t i) {
    Floats x = L::FromBf16(p.x + i);
    if constexpr (!kAdds) return x;
    x = L::RoundedToBf16(L::Add(x, L::FromBf16(p.added + i)));
    L::PutRounded(p.sum + i, x);
    return x;
  }

  // Writes a scale as registers of normed numbers are multiplied by it: of each whole kPair numbers first the even ones, as L::EvenOdd
  // has them.
  static void InPairs(const float* scale, int64_t D, float* to) {
    int64_t d = 0;
    for (; d + kPair <= D; d += kPair) {
      Floats even, odd;
      L::EvenOdd(L::Load(scale + d), L::Load(scale + d + L::kCount), even, odd);
      L::Store(to + d, even), L::Store(to + d + L::kCount, odd);
    }
    for (; d < D; d += L::kCount) L::Store(to + d, L::Load(scale + d));
  }

  // A register of normed numbers before their last rounding, or of x where there is no norm.
  template <Norm norm>
  static Floats Normed(Floats x, const float* scale, Floats factor) {
    if constexpr (norm == Norm::kNone) return x;
    x = L::Mul(x, factor);
    if constexpr (norm == Norm::kRounded) x = L::RoundedToBf16(x);
    return L::Mul(x, L::Load(scale));
  }

  template <Norm norm>
  static void Scale(const bf16* from, const float* scale, int64_t D, float factor, bf16* to) {
    Floats all = L::Set(factor);
    int64_t d = 0;
    for (; d + kPair <= D; d += kPair) {
      Floats even, odd;
      L::EvenOdd(from + d, even, odd);
      L::PutEvenOdd(to + d, Normed<norm>(even, scale + d, all), Normed<norm>(odd, scale + d + L::kCount, all));
    }
    for (; d < D; d += L::kCount) L::PutRounded(to + d, Normed<norm>(L::FromBf16(from + d), scale + d, all));
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
    auto normed = [&](int64_t d) {
      Floats x = Normed<norm>(L::FromBf16(from + d), scale + d, all);
      return norm == Norm::kNone ? x : L::RoundedToBf16(x);
    };
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
