// Products of bf16 in f32, on any level whose Lanes hold 8 f32; see linear.h and experts.h. An element is 8 sums along E, one a
// lane of a register: of each 16 inputs the lane i has the inputs 2 i and 2 i + 1. They are added up at the end.
//
// XLA:CPU makes f32 of w and packs it anew at each call; few rows of x meet w as it lies, in tiles of 3 rows of x and 3 of w.
// Many rows are worth packing it, 16 rows of w at a time, which a tile of 6 rows of x needs fewer loads for: then lanes are rows
// of w, and the 8 sums of an element are those of 8 panels (f32_panels.h). Both have the same bits.
#pragma once

#include "experts.h"
#include "f32_panels.h"
#include "linear.h"
#include "mlp.h"

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

// The same products, for many rows of x.
template <typename L>
class F32ManyRows {
  using P = F32Panels<L>;

 public:
  static constexpr int64_t kLeast = 32;       // rows of x that are worth it, by whole steps (docs/speed.md)
  static constexpr int64_t kCols = P::kCols;  // rows of w in a group
  static constexpr int64_t kShares = 32;      // of a product, a thread

  // How many floats T rows of x are in panels.
  static int64_t Packed(int64_t T, int64_t E) { return PanelsOf(T) * kSums * Apart(E); }

  template <typename X>
  static void PackRows(ffi::ThreadPool& pool, const X& x, int64_t T, int64_t E, float* packed) {
    auto pack = [&](int64_t panel) {
      int64_t first = FirstOf(panel, T), rows = FirstOf(panel + 1, T) - first;
      const bf16* from[L::kCount];
      for (int64_t i = 0; i < L::kCount; ++i) from[i] = x(first + std::min(i, rows - 1));
      float* to[kSums];
      for (int64_t i = 0; i < kSums; ++i) to[i] = packed + Place(panel, i, T) * Apart(E);
      for (int64_t e = 0; e < E; e += L::kCount) {
        Words pairs[L::kCount / 2];
        L::PairsOfRows(from, e, pairs);
        // A register is wider than a row of a panel: what follows it is written after it.
        float** sum = to + e % kInputs / 2;
#pragma GCC unroll 4
        for (int k = 0; k < L::kCount / 2; ++k, ++sum) {
          L::Store(*sum, L::Even(pairs[k])), L::Store(*sum + P::kRows, L::Odd(pairs[k]));
          *sum += 2 * P::kRows;
        }
      }
    };
    if (T * E > kAlone) return ParallelFor(pool, PanelsOf(T), pack);
    for (int64_t panel = 0; panel < PanelsOf(T); ++panel) pack(panel);
  }

  // One thread's part of a product: the groups [begin, end) of w for T packed rows of x. y(t) is where row t begins.
  template <typename Y>
  static void MultiplyGroups(const float* x, const Y& y, int64_t T, const bf16* w, int64_t N, int64_t E, int64_t begin,
                             int64_t end) {
    auto write = [&](int64_t group, int64_t panel, const float* sums, int64_t) {
      int64_t n = group * kCols, count = std::min(kCols, N - n);
      for (int64_t t = FirstOf(panel, T); t < FirstOf(panel + 1, T); ++t, sums += kCols) Write(sums, count, y(t) + n);
    };
    MultiplyTogether<1>(x, T, w, N, E, begin, end, [](int64_t group, int) { return group * kCols; }, write);
  }

  // One thread's part of h = gated(gate . x, up . x): the groups [begin, end) of gate and up, which are w [2, F, E]. h, rounded to
  // bf16, is packed as rows are.
  template <typename Gated>
  static void MultiplyGated(const float* x, float* h, int64_t T, const bf16* w, int64_t F, int64_t E, int64_t begin, int64_t end,
                            const Gated& gated) {
    auto pack = [&](int64_t group, int64_t panel, const float* gates, int64_t apart) {
      int64_t rows = FirstOf(panel + 1, T) - FirstOf(panel, T);
      float of_tile[P::kRows * kCols];
      for (int64_t i = 0; i < rows * kCols; ++i) of_tile[i] = FromBf16(ToBf16(gated(gates[i], gates[apart + i])));
      for (int64_t j = 0; j < kCols; ++j) {
        float* to = h + Place(panel, j / 2, T) * Apart(F) + (group * 2 + j % 2) * P::kRows;
        for (int64_t r = 0; r < rows; ++r) to[r] = of_tile[r * kCols + j];
      }
    };
    MultiplyTogether<2>(x, T, w, 2 * F, E, begin, end, [F](int64_t group, int i) { return i * F + group * kCols; }, pack);
  }

 private:
  using Words = typename L::Words;
  using Floats = typename L::Floats;
  static constexpr int64_t kSums = L::kCount;        // of an element
  static constexpr int64_t kLevels = 3;              // of sums that wait: of one, of two, and of four
  static constexpr int64_t kPanels = 16;             // of x that meet a panel of w while it is in the L1 cache
  static constexpr int64_t kAlone = 1 << 15;         // numbers of x that are packed before another thread could begin
  static constexpr int64_t kInputs = 2 * L::kCount;  // of which each of the sums has two
  static constexpr int64_t kLineInputs = kCacheLine / sizeof(bf16);
  static constexpr int64_t kPadding = kCacheLine / sizeof(float);  // after a panel: the next is not in the same set of a cache
  static_assert(kCols == 2 * L::kCount && kSums == 8 && P::kRows <= L::kCount);

  // Panels have as many rows as each other, or one more.
  static int64_t PanelsOf(int64_t T) { return (T + P::kRows - 1) / P::kRows; }
  static int64_t FirstOf(int64_t panel, int64_t T) { return panel * T / PanelsOf(T); }

  // From one panel [E/8][kRows] of x to the next, in floats.
  static int64_t Apart(int64_t E) { return E / kSums * P::kRows + kPadding; }

  // Where the panel of a sum is among those of x: they lie in the order in which they meet w.
  static int64_t Place(int64_t panel, int64_t sum, int64_t T) {
    int64_t first = panel / kPanels * kPanels, count = std::min(kPanels, PanelsOf(T) - first);
    return first * kSums + sum * count + panel - first;
  }

  // One thread's part of products that share x: for each of the steps [begin, end) kTogether groups of w, of which the i-th begins
  // with row first_of(step, i). take(step, panel, sums, apart) is called with the sums [rows of the panel][kCols] of the first
  // group, those of the next one `apart` floats after them.
  //
  // An element's 8 sums are added up as L::PutSums adds up those of lanes, in pairs, pairs of pairs, and both: of the i-th comes in
  // what waits for it, which is as much as i has ones at its end, so that three tiles a panel at most wait at any time.
  template <int kTogether, typename First, typename Take>
  static void MultiplyTogether(const float* x, int64_t T, const bf16* w, int64_t N, int64_t E, int64_t begin, int64_t end,
                               const First& first_of, const Take& take) {
    static thread_local Memory of_weight, of_sums;
    int64_t depth = E / kSums, apart = depth * kCols + kPadding, size = P::kRows * kCols;
    int64_t panels = PanelsOf(T), most = std::min(panels, kPanels), of_level = most * kTogether * size;
    float* packed = Scratch<float>(of_weight, kTogether * kSums * apart);
    float* sums = Scratch<float>(of_sums, kLevels * of_level);
    for (int64_t step = begin; step < end; ++step) {
      for (int i = 0; i < kTogether; ++i) PackWeight(w, N, E, first_of(step, i), apart, packed + i * kSums * apart);
      // What is packed next, by this item or the one after it, comes into the cache meanwhile, a few lines with each tile: the
      // processor would wait for many at once.
      bool is_last = first_of(step + 1, kTogether - 1) >= N;
      int64_t of_group = kCols * E / kLineInputs, lines = is_last ? 0 : kTogether * of_group, fetched = 0;
      int64_t tiles = panels * kSums * kTogether, done = 0;
      for (int64_t first = 0; first < panels; first += most) {
        int64_t last = std::min(panels, first + most);
        for (int64_t i = 0; i < kSums; ++i) {
          int64_t waiting = __builtin_ctzll(i + 1), level = __builtin_popcountll(i) - waiting;
          for (int group = 0; group < kTogether; ++group) {
            const float* a = x + Place(first, i, T) * Apart(E);
            float* c = sums + level * of_level + group * size;
            for (int64_t panel = first; panel < last; ++panel, a += Apart(E), c += kTogether * size) {
              for (++done; fetched * tiles < lines * done; ++fetched) {
                PrefetchL2(w + first_of(step + 1, fetched / of_group) * E + fetched % of_group * kLineInputs);
              }
              int64_t rows = FirstOf(panel + 1, T) - FirstOf(panel, T);
              P::AddUp(rows, waiting, a, packed + (group * kSums + i) * apart, depth, c, of_level);
              if (i == kSums - 1 && group == kTogether - 1) take(step, panel, c - group * size, size);
            }
          }
        }
      }
    }
  }

  // Writes kCols rows of w from row n on, the last one again where there are no more: a panel [E/8][kCols] for each sum.
  static void PackWeight(const bf16* w, int64_t N, int64_t E, int64_t n, int64_t apart, float* to) {
    const bf16* from[2][L::kCount];
    for (int64_t i = 0; i < 2 * L::kCount; ++i) from[i / L::kCount][i % L::kCount] = w + std::min(n + i, N - 1) * E;
    for (int64_t line = 0; line < E; line += kLineInputs) {
      for (int64_t half = 0; half < 2; ++half) {
        for (int64_t e = line; e < std::min(E, line + kLineInputs); e += L::kCount) {
          Words pairs[L::kCount / 2];
          L::PairsOfRows(from[half], e, pairs);
          float* panel = to + e % kInputs / 2 * apart + e / kInputs * 2 * kCols + half * L::kCount;
#pragma GCC unroll 4
          for (int k = 0; k < L::kCount / 2; ++k, panel += apart) {
            L::Store(panel, L::Even(pairs[k])), L::Store(panel + kCols, L::Odd(pairs[k]));
          }
        }
      }
    }
  }

  // Writes `count` numbers of a row of a tile.
  template <typename Out>
  static void Write(const float* sums, int64_t count, Out* to) {
    if (count == kCols) return PutInOrder(to, L::Load(sums), L::Load(sums + L::kCount));
    for (int64_t j = 0; j < count; ++j) Put(to + j, sums[j]);
  }

  static void PutInOrder(float* to, Floats first, Floats second) { L::Store(to, first), L::Store(to + L::kCount, second); }
  static void PutInOrder(bf16* to, Floats first, Floats second) { L::PutInOrder(to, first, second); }
  static void Put(float* to, float x) { *to = x; }
  static void Put(bf16* to, float x) { *to = ToBf16(x); }
};

// y of x, whose many rows are packed.
template <typename L, typename Out>
void MultiplyPacked(ffi::ThreadPool& pool, const float* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  using M = F32ManyRows<L>;
  int64_t groups = (N + M::kCols - 1) / M::kCols, items = SharesOf(pool, groups, 1, M::kShares);
  ParallelFor(pool, items, [&](int64_t item) {
    auto to = [&](int64_t t) { return y + t * N; };
    M::MultiplyGroups(x, to, T, w, N, E, groups * item / items, groups * (item + 1) / items);
  });
}

template <typename L, typename Out>
void MultiplyInF32(ffi::ThreadPool& pool, const bf16* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  using P = F32Products<L>;
  if (T == 0) return;
  if (T >= F32ManyRows<L>::kLeast) {
    using M = F32ManyRows<L>;
    static thread_local Memory memory;
    float* packed = Scratch<float>(memory, M::Packed(T, E));
    M::PackRows(pool, [&](int64_t t) { return x + t * E; }, T, E, packed);
    return MultiplyPacked<L>(pool, packed, w, y, T, N, E);
  }
  int64_t groups = (N + P::kCols - 1) / P::kCols, items = SharesOf(pool, groups, 4);
  ParallelFor(pool, items, [&](int64_t item) {
    auto from = [&](int64_t t) { return x + t * E; };
    auto to = [&](int64_t t) { return y + t * N; };
    P::MultiplyGroups(from, to, T, w, N, E, groups * item / items, groups * (item + 1) / items);
  });
}

// The products of mlp.h, of many rows.
template <typename L, typename Out>
bool MlpInF32(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, Out* y, int64_t T,
              int64_t N, int64_t E, int64_t F) {
  using M = F32ManyRows<L>;
  if (T < M::kLeast) return false;
  static thread_local Memory of_x, of_h;
  float *packed = Scratch<float>(of_x, M::Packed(T, E)), *h = Scratch<float>(of_h, M::Packed(T, F));
  M::PackRows(pool, [&](int64_t t) { return x + t * E; }, T, E, packed);
  int64_t groups = F / M::kCols, items = SharesOf(pool, groups, 1, M::kShares);
  auto gate = [&](auto gated) {
    ParallelFor(pool, items, [&](int64_t item) {
      M::MultiplyGated(packed, h, T, gate_up, F, E, groups * item / items, groups * (item + 1) / items, gated);
    });
  };
  if (kind == Activation::kSilu) {
    gate([](float gate, float up) { return Gated<Activation::kSilu>(gate, up); });
  } else {
    gate([](float gate, float up) { return Gated<Activation::kGeluTanh>(gate, up); });
  }
  MultiplyPacked<L>(pool, h, down, y, T, N, F);
  return true;
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
