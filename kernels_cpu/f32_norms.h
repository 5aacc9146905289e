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

  static void WriteHeads(const HeadProblem& p, int64_t first, int64_t last) {
    p.half % kPair == 0 ? WriteBy<2>(p, first, last) : WriteBy<1>(p, first, last);
  }

 private:
  using Floats = typename L::Floats;
  static constexpr int64_t kRegisters = kParts / L::kCount;
  enum class Norm { kNone, kRounded, kInF32 };  // kRounded: normed numbers are rounded before they are scaled

  static constexpr int64_t kTogether = 4;  // rows that are summed side by side, since an addition waits for the one before
  static constexpr int64_t kPair = 2 * L::kCount;
  static constexpr int64_t kAhead = 3;  // tokens from one that is prepared to one that is fetched

  template <int64_t n>
  static void WriteBy(const HeadProblem& p, int64_t first, int64_t last) {
    auto write = p.q_scale == nullptr ? &Write<Norm::kNone, n> : p.in_f32 ? &Write<Norm::kInF32, n> : &Write<Norm::kRounded, n>;
    write(p, first, last);
  }

  // Partial sums of a row's squares.
  class Squares {
   public:
    Squares() {
      for (Floats& part : parts_) part = L::Zero();
    }

    // Adds those of the register i of kParts numbers.
    void Add(int64_t i, Floats x) { parts_[i] = L::Add(parts_[i], L::Mul(x, x)); }

    // A register whose halves are to be added until there is one sum.
    Floats Parts() const {
      if constexpr (kRegisters == 2) return L::Add(parts_[0], parts_[1]);
      return parts_[0];
    }

   private:
    Floats parts_[kRegisters];
  };

  static void PutSums(const Squares (&squares)[kTogether], float* sums) {
    L::PutSumsOfHalves(sums, squares[0].Parts(), squares[1].Parts(), squares[2].Parts(), squares[3].Parts());
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
    const bf16* added = p.added != nullptr ? p.added : p.x;
    for (int64_t i = 0; i < count; ++i) {
      // A row that is summed next is brought into the cache meanwhile: a product may have written it past the cache.
      auto fetch = [after = (t + kTogether + i) * p.E, &p, added](int64_t d) { PrefetchL1(p.x + after + d), PrefetchL1(added + after + d); };
      Scale<norm>(from + i * p.E, scale, p.E, 1.0f / std::sqrt(sums[i] / p.E + p.eps), p.y + (t + i) * p.E, fetch);
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
    if constexpr (kRows == kTogether) return PutSums(squares, sums);
    for (int64_t row = 0; row < kRows; ++row) sums[row] = L::SumOfHalves(squares[row].Parts());
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

  // Writes a row times its factor and the scale, and calls fetch(d) beside the numbers from each d on.
  template <Norm norm, typename Fetch>
  static void Scale(const bf16* from, const float* scale, int64_t D, float factor, bf16* to, const Fetch& fetch) {
    Floats all = L::Set(factor);
    int64_t d = 0;
    for (; d + kPair <= D; d += kPair) {
      Floats even, odd;
      fetch(d);
      L::EvenOdd(from + d, even, odd);
      L::PutRounded(to + d, Normed<norm>(even, scale + d, all), Normed<norm>(odd, scale + d + L::kCount, all));
    }
    for (; d < D; d += L::kCount) L::PutRounded(to + d, Normed<norm>(L::FromBf16(from + d), scale + d, all));
  }

  // Prepares the heads of the tokens [first, last), n registers at a time: two have the numbers of even and of odd places, as
  // L::EvenOdd has them, and one has numbers in their own order.
  template <Norm norm, int64_t n>
  static void Write(const HeadProblem& p, int64_t first, int64_t last) {
    static thread_local Memory memory;
    const int64_t G = p.G, D = p.D, row = p.K * (G + 2) * D, heads = (p.K * (G + 1) + kParts - 1) / kParts * kParts;
    float* factors = Scratch<float>(memory, 2 * heads + 3 * D + 2 * p.half);  // of this token's queries and keys
    float *factors_after = factors + heads, *q_scale = factors_after + heads, *k_scale = q_scale + D, *x = k_scale + D;
    float *cos = x + D, *sin = cos + p.half;
    if constexpr (norm != Norm::kNone) InRegisters<n>(p.q_scale, D, q_scale), InRegisters<n>(p.k_scale, D, k_scale);
    auto put_factors = [&](int64_t t, float* to) {
      if (norm != Norm::kNone && t < last) Factors(p, p.qkv + t * row, to);
    };
    std::fill(factors, factors + 2 * heads, 1.0f);  // what comes of no head is divided too
    put_factors(first, factors);
    for (int64_t t = first; t < last; ++t, std::swap(factors, factors_after)) {
      // Those of the next token before this one is prepared: a head waits long for its sum, a root and two quotients.
      put_factors(t + 1, factors_after);
      InRegisters<n>(p.cos + t * p.half, p.half, cos), InRegisters<n>(p.sin + t * p.half, p.half, sin);
      const bf16* from = p.qkv + t * row;
      bf16 *q = p.q + t * p.K * G * D, *kept = Kept(p, t);
      const float* factor = factors;
      // A token after this one is brought into the cache meanwhile: products may have written it past the cache.
      auto fetch = [&] {
        for (int64_t d = 0; d < D; d += kCacheLine / sizeof(bf16)) PrefetchL2(from + kAhead * row + d);
      };
      for (int64_t k = 0; k < p.K; ++k) {
        for (int64_t g = 0; g < G; ++g, from += D, q += D) {
          fetch();
          Prepare<norm, n>(p, from, q_scale, *factor++, cos, sin, x, q);
        }
        fetch();
        if (kept != nullptr) Prepare<norm, n>(p, from, k_scale, *factor, cos, sin, x, kept);
        ++factor, from += D;
        fetch();
        if (kept != nullptr) std::memcpy(kept + D, from, D * sizeof(bf16)), kept += 2 * D;
        from += D;
      }
    }
  }

  // Where a token's keys and values lie in the pool; null where they are dropped.
  static bf16* Kept(const HeadProblem& p, int64_t token) {
    int64_t slot = p.slots[token];
    return slot >= 0 && slot < p.slots_of_layer ? p.pool + (p.first_slot + slot) * 2 * p.K * p.D : nullptr;
  }

  // Writes by what to multiply each of a token's queries and keys.
  static void Factors(const HeadProblem& p, const bf16* from, float* factors) {
    const bf16* heads[kTogether];
    int64_t all = p.K * (p.G + 1), head = 0, count = 0;
    for (int64_t k = 0; k < p.K; ++k, from += p.D) {
      for (int64_t i = 0; i < p.G + 1; ++i, from += p.D) {
        heads[count++] = from;
        if (count == kTogether) SumHeads(heads, p.D, factors + head), head += kTogether, count = 0;
      }
    }
    if (count > 0) std::fill(heads + count, heads + kTogether, heads[0]), SumHeads(heads, p.D, factors + head);
    for (head = 0; head < all; head += L::kCount) {
      Floats mean = L::Div(L::Load(factors + head), L::Set(p.D));
      L::Store(factors + head, L::Div(L::Set(1.0f), L::Sqrt(L::Add(mean, L::Set(p.eps)))));
    }
  }

  // Sums the squares of each of some heads.
  static void SumHeads(const bf16* const (&heads)[kTogether], int64_t D, float* sums) {
    Squares squares[kTogether];
    for (int64_t d = 0; d < D; d += kParts) {
      for (int64_t i = 0; i < kRegisters; ++i) {
#pragma GCC unroll 4
        for (int64_t head = 0; head < kTogether; ++head) squares[head].Add(i, L::FromBf16(heads[head] + d + i * L::kCount));
      }
    }
    PutSums(squares, sums);
  }

  // Writes numbers as n registers of a head are multiplied by them.
  template <int64_t n>
  static void InRegisters(const float* from, int64_t count, float* to) {
    if constexpr (n == 2) {
      InPairs(from, count, to);
    } else {
      std::copy(from, from + count, to);
    }
  }

  // Writes a head, normed where there is a scale, and rotated. x: memory for D numbers.
  template <Norm norm, int64_t n>
  [[gnu::always_inline]] static void Prepare(const HeadProblem& p, const bf16* from, const float* scale, float factor, const float* cos,
                                             const float* sin, float* x, bf16* to) {
    constexpr int64_t kStep = n * L::kCount;
    const int64_t half = p.half, D = p.D;
    Floats all = L::Set(factor);
    if (n == 2 || half % kStep == 0) {
      for (int64_t i = 0; i < half; i += kStep) {
        Floats a[n], b[n], turned_a[n], turned_b[n];
        Read<norm>(from + i, scale + i, all, a), Read<norm>(from + half + i, scale + half + i, all, b);
        for (int64_t j = 0; j < n; ++j) {
          Floats c = L::Load(cos + i + j * L::kCount), s = L::Load(sin + i + j * L::kCount);
          turned_a[j] = L::Sub(L::Mul(a[j], c), L::Mul(b[j], s));
          turned_b[j] = L::Add(L::Mul(b[j], c), L::Mul(a[j], s));
        }
        Put(to + i, turned_a), Put(to + half + i, turned_b);
      }
      for (int64_t d = 2 * half; d < D; d += kStep) {
        Floats y[n];
        Read<norm>(from + d, scale + d, all, y), Put(to + d, y);
      }
    } else {
      for (int64_t d = 0; d < D; d += L::kCount) {
        Floats y[1];
        Read<norm>(from + d, scale + d, all, y), L::Store(x + d, y[0]);
      }
      const float *a = x, *b = x + half;
      for (int64_t i = 0; i < half; ++i) {
        to[i] = ToBf16(a[i] * cos[i] - b[i] * sin[i]), to[half + i] = ToBf16(b[i] * cos[i] + a[i] * sin[i]);
      }
      for (int64_t d = 2 * half; d < D; ++d) to[d] = ToBf16(x[d]);
    }
  }

  // Takes numbers of a head, normed and rounded where there is a scale.
  template <Norm norm, int64_t n>
  [[gnu::always_inline]] static void Read(const bf16* from, const float* scale, Floats factor, Floats (&x)[n]) {
    if constexpr (n == 2) {
      L::EvenOdd(from, x[0], x[1]);
    } else {
      x[0] = L::FromBf16(from);
    }
    for (int64_t i = 0; i < n && norm != Norm::kNone; ++i) x[i] = L::RoundedToBf16(Normed<norm>(x[i], scale + i * L::kCount, factor));
  }

  template <int64_t n>
  [[gnu::always_inline]] static void Put(bf16* to, const Floats (&x)[n]) {
    if constexpr (n == 2) {
      L::PutRounded(to, x[0], x[1]);
    } else {
      L::PutRounded(to, x[0]);
    }
  }
};

}  // namespace jpaged
