// Products of bf16 in f32, on any level whose Lanes hold 8 f32; see linear.h and experts.h. XLA:CPU makes f32 of w and packs
// it anew at each call; here w and x are used as they lie: a tile of 3 rows of x and 3 of w is 9 registers of partial sums
// along E, added up at its end.
#pragma once

#include "experts.h"
#include "linear.h"

namespace jpaged {

template <typename L>
class F32Products {
 public:
  static constexpr int64_t kRows = 3, kCols = 3;  // of a tile

  // Groups of 3 rows of w [N, E] that stay in the L2 cache while many rows of x pass.
  static int64_t BlockGroups(int64_t E) { return std::max<int64_t>(1, kBlockBytes / (2 * kCols * E)); }

  // One thread's part of a product: the groups [begin, end) of w for all T rows of x. x(t) and y(t) are where row t begins.
  template <typename X, typename Y>
  static void MultiplyGroups(const X& x, const Y& y, int64_t T, const bf16* w, int64_t N, int64_t E, int64_t begin,
                             int64_t end) {
    using Out = std::remove_pointer_t<decltype(y(0))>;
    bool is_few = T <= kFewRows;
    int64_t tiles = (T + kRows - 1) / kRows;
    // Few rows all meet a group of w while it is in the cache, and the next one comes from memory meanwhile. Of many rows
    // each three meet a block of groups.
    int64_t block = is_few ? 1 : BlockGroups(E);
    int64_t share = is_few ? (kCols * E / kLineInputs + tiles - 1) / tiles : 0;
    int64_t at_once = (share * 2 * L::kCount + E - 1) / E;
    for (int64_t first = begin; first < end; first += block) {
      Ahead ahead{w + (first + block) * kCols * E, share, at_once};
      for (int64_t t = 0; t < T; t += kRows, ahead.from += share * kLineInputs) {
        int64_t rows = std::min(kRows, T - t);
        const bf16* from[kRows];  // the last one again where there are no more
        Out* to[kRows];
        for (int64_t g = first; g < std::min(end, first + block); ++g) {
          int64_t n = g * kCols, cols = std::min(kCols, N - n);
          const bf16* columns[kCols];
          for (int64_t j = 0; j < kCols; ++j) columns[j] = w + (n + std::min(j, cols - 1)) * E;
          for (int64_t i = 0; i < kRows; ++i) {
            from[i] = x(t + std::min(i, rows - 1)), to[i] = y(t + std::min(i, rows - 1)) + n;
          }
          auto tile = rows == 3 ? &MultiplyTile<3, Out> : rows == 2 ? &MultiplyTile<2, Out> : &MultiplyTile<1, Out>;
          tile(from, columns, E, to, cols, ahead);
        }
      }
    }
  }

 private:
  static constexpr int64_t kFewRows = 64;             // of x, which stay in the cache beside three rows of w
  static constexpr int64_t kBlockBytes = 192 * 1024;  // of w that stays in the L2 cache
  static constexpr int64_t kLineInputs = kCacheLine / sizeof(bf16);

  // What comes next of w: how many lines of it to bring into the cache, and how many at a time: evenly, or the processor
  // waits for them.
  struct Ahead {
    const bf16* from;
    int64_t lines, at_once;
  };

  static void Put(float* to, float x) { *to = x; }
  static void Put(bf16* to, float x) { *to = ToBf16(x); }

  // The products of R rows of x and 3 rows of w, of which `cols` columns go to y.
  template <int R, typename Out>
  static void MultiplyTile(const bf16* const (&x)[kRows], const bf16* const (&w)[kCols], int64_t E, Out* const (&y)[kRows],
                           int64_t cols, Ahead ahead) {
    using Floats = typename L::Floats;
    Floats acc[R][4];  // the fourth stays zero
#pragma GCC unroll 3
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[i][j] = L::Zero();
    }
    for (int64_t e = 0; e < E; e += 2 * L::kCount) {
      for (int64_t n = ahead.at_once; n > 0 && ahead.lines > 0; --n, --ahead.lines) {
        PrefetchL2(ahead.from);
        ahead.from += kLineInputs;
      }
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        Floats b[kCols];
#pragma GCC unroll 3
        for (int j = 0; j < kCols; ++j) b[j] = half == 0 ? L::Even(L::LoadWords(w[j] + e)) : L::Odd(L::LoadWords(w[j] + e));
#pragma GCC unroll 3
        for (int i = 0; i < R; ++i) {
          Floats a = half == 0 ? L::Even(L::LoadWords(x[i] + e)) : L::Odd(L::LoadWords(x[i] + e));
#pragma GCC unroll 3
          for (int j = 0; j < kCols; ++j) acc[i][j] = L::Fma(a, b[j], acc[i][j]);
        }
      }
    }
#pragma GCC unroll 3
    for (int i = 0; i < R; ++i) {
      float sums[4];
      L::PutSums(sums, acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
      for (int64_t j = 0; j < kCols; ++j) {
        if (j < cols) Put(y[i] + j, sums[j]);
      }
    }
  }
};

template <typename L, typename Out>
void MultiplyInF32(ffi::ThreadPool& pool, const bf16* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  using P = F32Products<L>;
  if (T == 0) return;
  int64_t groups = (N + P::kCols - 1) / P::kCols, items = SharesOf(pool, groups, 4);
  ParallelFor(pool, items, [&](int64_t item) {
    auto from = [&](int64_t t) { return x + t * E; };
    auto to = [&](int64_t t) { return y + t * N; };
    P::MultiplyGroups(from, to, T, w, N, E, groups * item / items, groups * (item + 1) / items);
  });
}

// The unit of work is a strip of one expert's weight, for all of its tokens.
template <typename L>
void MultiplyExpertsInF32(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E) {
  using P = F32Products<L>;
  int64_t groups = (N + P::kCols - 1) / P::kCols, strips = (groups + P::BlockGroups(E) - 1) / P::BlockGroups(E);
  ParallelFor(pool, experts.size() * strips, [&](int64_t item) {
    const Expert& expert = experts[item / strips];
    int64_t strip = item % strips;
    auto from = [&](int64_t t) { return pairs.x[expert.first + t]; };
    auto to = [&](int64_t t) { return pairs.y[expert.first + t]; };
    P::MultiplyGroups(from, to, expert.count, expert.w, N, E, groups * strip / strips, groups * (strip + 1) / strips);
  });
}

// Rows of x for weights of which a few rows at a time become bf16; see bf16_weights.h.
template <typename L>
class F32Operand {
 public:
  static constexpr int64_t kAtOnce = 30;  // rows of a weight

  F32Operand(ffi::ThreadPool&, const bf16* x, int64_t T, int64_t E) : x_(x), T_(T), E_(E) {}

  void Multiply(const bf16* w, int64_t count, float* y, int64_t stride) const {
    using P = F32Products<L>;
    auto from = [&](int64_t t) { return x_ + t * E_; };
    auto to = [&](int64_t t) { return y + t * stride; };
    P::MultiplyGroups(from, to, T_, w, count, E_, 0, (count + P::kCols - 1) / P::kCols);
  }

 private:
  const bf16* x_;
  int64_t T_, E_;
};

}  // namespace jpaged
