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
  static int64_t Packed(int64_t T, int64_t E) { return Rows(T).panels.parts * kSums * Apart(E); }

  template <typename X>
  static void PackRows(ffi::ThreadPool& pool, const X& x, int64_t T, int64_t E, float* packed) {
    Rows all(T);
    auto pack = [&](int64_t panel) {
      int64_t first = all.panels.First(panel), rows = all.panels.Size(panel);
      const bf16* from[L::kCount];
      for (int64_t i = 0; i < L::kCount; ++i) from[i] = x(first + std::min(i, rows - 1));
      float* to[kSums];
      for (int64_t i = 0; i < kSums; ++i) to[i] = packed + all.Place(panel, i) * Apart(E);
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
    int64_t items = T * E > kAlone ? SharesOf(pool, all.panels.parts, 1) : 1;
    auto work = [&](int64_t item) {
      for (int64_t panel = all.panels.parts * item / items; panel < all.panels.parts * (item + 1) / items; ++panel) pack(panel);
    };
    if (items == 1) return work(0);
    ParallelFor(pool, items, work);
  }

  // One item of work of a product: the blocks [first_block, end_block) of rows times the groups [first_group, end_group) of w.
  struct Share {
    int64_t first_block, end_block, first_group, end_group;
  };

  // Calls multiply(share) for all shares of a product of T rows with `groups` groups. Those of the same rows follow each other, so
  // that a thread mostly meets rows which it has packed itself, few enough to stay in its L2 cache: a line that another core has
  // written takes several times as long as one from there. The price is that w is packed once for each part of the rows.
  template <typename Multiply>
  static void Divide(ffi::ThreadPool& pool, int64_t T, int64_t groups, const Multiply& multiply) {
    int64_t blocks = Rows(T).blocks.parts, parts = std::clamp<int64_t>(T / kRowsOfPart, 1, blocks);
    int64_t units = (groups + kAtOnce - 1) / kAtOnce, shares = SharesOf(pool, units, 1, std::max<int64_t>(1, kShares / parts));
    ParallelFor(pool, parts * shares, [&](int64_t item) {
      int64_t part = item / shares, share = item % shares;
      multiply(Share{blocks * part / parts, blocks * (part + 1) / parts, units * share / shares * kAtOnce,
                     std::min(groups, units * (share + 1) / shares * kAtOnce)});
    });
  }

  // A share of y, of T packed rows of x. y(t) is where row t begins.
  template <typename Y>
  static void MultiplyGroups(const float* x, const Y& y, int64_t T, const bf16* w, int64_t N, int64_t E, const Share& share) {
    Rows all(T);
    auto write = [&](int64_t group, int64_t panel, const float* sums, int64_t) {
      int64_t n = group * kCols, count = std::min(kCols, N - n), first = all.panels.First(panel);
      for (int64_t t = first; t < first + all.panels.Size(panel); ++t, sums += kCols) Write(sums, count, y(t) + n);
    };
    MultiplyTogether<1>(x, all, w, N, E, share, [](int64_t group, int) { return group * kCols; }, write);
  }

  // A share of h = gated(gate . x, up . x); w [2, F, E] is gate and up. h, rounded to bf16, is packed as rows are.
  template <typename Gated>
  static void MultiplyGated(const float* x, float* h, int64_t T, const bf16* w, int64_t F, int64_t E, const Share& share,
                            const Gated& gated) {
    Rows all(T);
    auto pack = [&](int64_t group, int64_t panel, const float* gates, int64_t apart) {
      int64_t rows = all.panels.Size(panel), of_first = all.Place(panel, 0), places = all.Place(panel, 1) - of_first;
      float* to = h + of_first * Apart(F) + group * 2 * P::kRows;
      float of_tile[P::kRows * kCols];
      for (int64_t i = 0; i < rows * kCols; ++i) of_tile[i] = FromBf16(ToBf16(gated(gates[i], gates[apart + i])));
      for (int64_t half = 0; half < kCols; half += L::kCount) {
        const float* from[L::kCount];
        for (int64_t i = 0; i < L::kCount; ++i) from[i] = of_tile + std::min(i, rows - 1) * kCols + half;
        Floats turned[L::kCount];
        L::Turn(from, turned);
#pragma GCC unroll 8
        for (int64_t j = 0; j < L::kCount; ++j) {
          L::StoreSix(to + (half + j) / 2 * places * Apart(F) + j % 2 * P::kRows, turned[j]);
        }
      }
    };
    MultiplyTogether<2>(x, all, w, 2 * F, E, share, [F](int64_t group, int i) { return i * F + group * kCols; }, pack);
  }

 private:
  using Words = typename L::Words;
  using Floats = typename L::Floats;
  static constexpr int64_t kSums = L::kCount;        // of an element
  static constexpr int64_t kLevels = 3;              // of sums that wait: of one, of two, and of four
  static constexpr int64_t kPanels = 16;             // of x that meet a panel of w while it is in the L1 cache
  static constexpr int64_t kRowsOfPart = 256;        // of x that are worth packing w for, at least
  static constexpr int64_t kAtOnce = 2;              // groups that are packed together: as many as a line of y in bf16 has
  static constexpr int64_t kAlone = 1 << 15;         // numbers of x that are packed before another thread could begin
  static constexpr int64_t kInputs = 2 * L::kCount;  // of which each of the sums has two
  static constexpr int64_t kLineInputs = kCacheLine / sizeof(bf16);
  static constexpr int64_t kPadding = kCacheLine / sizeof(float);  // after a panel: the next is not in the same set of a cache
  static_assert(kCols == 2 * L::kCount && kSums == 8 && P::kRows == 6);

  // The numbers below `all`, cut into as few parts of at most `most` as will do. Sizes differ by one at most, larger ones first.
  struct Cut {
    int64_t parts, size, longer;

    Cut(int64_t all, int64_t most) : parts((all + most - 1) / most), size(all / parts), longer(all % parts) {}
    int64_t First(int64_t part) const { return part * size + std::min(part, longer); }
    int64_t Size(int64_t part) const { return size + (part < longer); }
    int64_t PartOf(int64_t number) const {
      int64_t rest = number - longer * (size + 1);
      return rest < 0 ? number / (size + 1) : longer + rest / size;
    }
  };

  // The rows of x, cut into panels, and panels into blocks, whose panels meet a panel of w one after another.
  struct Rows {
    Cut panels, blocks;

    explicit Rows(int64_t T) : panels(T, P::kRows), blocks(panels.parts, kPanels) {}

    // Where the panel of a sum is among those of x: they lie in the order in which they meet w.
    int64_t Place(int64_t panel, int64_t sum) const {
      int64_t block = blocks.PartOf(panel), first = blocks.First(block);
      return first * kSums + sum * blocks.Size(block) + panel - first;
    }
  };

  // From one panel [E/8][kRows] of x to the next, in floats.
  static int64_t Apart(int64_t E) { return E / kSums * P::kRows + kPadding; }

  // A share of products that have x in common: for each of its groups there are kTogether of w, of which the i-th begins with row
  // first_of(group, i). take(group, panel, sums, apart) is called with the sums [rows of the panel][kCols] of the first of them; those
  // of the next one lie `apart` floats after them.
  //
  // An element's 8 sums are added up as L::PutSums adds up those of lanes, in pairs, pairs of pairs, and both: of the i-th comes in
  // what waits for it, which is as much as i has ones at its end, so that three tiles a panel at most wait at any time.
  template <int kTogether, typename First, typename Take>
  static void MultiplyTogether(const float* x, const Rows& all, const bf16* w, int64_t N, int64_t E, const Share& share,
                               const First& first_of, const Take& take) {
    static thread_local Memory of_weight, of_sums;
    int64_t depth = E / kSums, apart = depth * kCols + kPadding, of_group = kSums * apart, size = P::kRows * kCols;
    int64_t of_level = all.blocks.Size(0) * kTogether * size;
    int64_t tiles = (all.blocks.First(share.end_block) - all.blocks.First(share.first_block)) * kSums;
    float* packed = Scratch<float>(of_weight, kAtOnce * kTogether * of_group);
    float* sums = Scratch<float>(of_sums, kLevels * of_level);
    for (int64_t first = share.first_group; first < share.end_group; first += kAtOnce) {
      // What is packed next, by this item or the one after it, comes into the cache meanwhile, a few lines with each tile: the
      // processor would wait for many at once.
      int64_t count = std::min(kAtOnce, share.end_group - first);
      typename P::Ahead ahead[kAtOnce][kTogether];
      for (int64_t n = 0; n < count; ++n) {
        int64_t next = first + kAtOnce + n, lines = first_of(next, kTogether - 1) < N ? kCols * E / kLineInputs : 0;
        for (int i = 0; i < kTogether; ++i) {
          PackWeight(w, N, E, first_of(first + n, i), apart, packed + (n * kTogether + i) * of_group);
          auto* from = reinterpret_cast<const char*>(w + first_of(next, i) * E);
          ahead[n][i] = {from, from + (lines - 1) * kCacheLine, (lines + tiles - 1) / tiles};
        }
      }
      for (int64_t block = share.first_block; block < share.end_block; ++block) {
        int64_t panel = all.blocks.First(block), panels = all.blocks.Size(block);
        int64_t taller = std::clamp<int64_t>(all.panels.longer - panel, 0, panels);  // that have one row more
        for (int64_t n = 0; n < count; ++n) {
          for (int64_t sum = 0; sum < kSums; ++sum) {
            int64_t waiting = __builtin_ctzll(sum + 1), level = __builtin_popcountll(sum) - waiting;
            const float* a = x + all.Place(panel, sum) * Apart(E);
            for (int i = 0; i < kTogether; ++i) {
              const float* b = packed + (n * kTogether + i) * of_group + sum * apart;
              float* c = sums + level * of_level + i * size;
              auto add_up = [&](int64_t rows, int64_t begin, int64_t end) {
                P::AddUp(rows, waiting, end - begin, a + begin * Apart(E), Apart(E), b, depth, c + begin * kTogether * size,
                         kTogether * size, of_level, ahead[n][i]);
              };
              if (taller > 0) add_up(all.panels.size + 1, 0, taller);
              if (taller < panels) add_up(all.panels.size, taller, panels);
            }
          }
          for (int64_t j = 0; j < panels; ++j) take(first + n, panel + j, sums + j * kTogether * size, size);
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
  M::Divide(pool, T, (N + M::kCols - 1) / M::kCols, [&](const typename M::Share& share) {
    M::MultiplyGroups(x, [&](int64_t t) { return y + t * N; }, T, w, N, E, share);
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
  auto gate = [&](auto gated) {
    M::Divide(pool, T, F / M::kCols, [&](const typename M::Share& share) {
      M::MultiplyGated(packed, h, T, gate_up, F, E, share, gated);
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
