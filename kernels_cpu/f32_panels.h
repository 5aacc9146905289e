// Products of packed panels in f32, on any level; see panels.h. A tile of kRows x kCols sums stays in registers while panels
// pass (K. Goto and R. van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008): [k][kRows] of x, of which a
// number is broadcast, and [k][kCols] of w.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "panels.h"

namespace jpaged {

inline float ToFloat(float x) { return x; }
inline float ToFloat(bf16 x) { return FromBf16(x); }

template <typename L>
struct F32Panels {
  // Of a tile: 12 sums of 16 registers, or 24 of 32.
  static constexpr int64_t kRows = L::kCount == 16 ? 12 : 6, kCols = 2 * L::kCount;
  static_assert(kPanelRows % kRows == 0);

  // Adds a . b to acc[R][kCols]: a[r][k] lies at r * kRow + k * kStep, b[k] is kCols numbers, b_step apart.
  template <int R, int64_t kRow, int64_t kStep>
  [[gnu::always_inline]] static void Accumulate(const float* a, const float* b, int64_t b_step, int64_t K,
                                                typename L::Floats (&acc)[R][2]) {
    constexpr int64_t kUnrolled = 4;
    int64_t k = 0;
    for (; k + kUnrolled <= K; k += kUnrolled, a += kUnrolled * kStep, b += kUnrolled * b_step) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < kUnrolled; ++i) AccumulateStep<R, kRow>(a + i * kStep, b + i * b_step, acc);
    }
    for (; k < K; ++k, a += kStep, b += b_step) AccumulateStep<R, kRow>(a, b, acc);
  }

  // c[R][kCols] = a . b, or c + a . b.
  template <int R, int64_t kRow, int64_t kStep>
  static void MultiplyTile(const float* a, const float* b, int64_t b_step, int64_t K, float* c, int64_t c_row, bool adds) {
    typename L::Floats acc[R][2];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      acc[r][0] = adds ? L::Load(c + r * c_row) : L::Zero();
      acc[r][1] = adds ? L::Load(c + r * c_row + L::kCount) : L::Zero();
    }
    Accumulate<R, kRow, kStep>(a, b, b_step, K, acc);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      L::Store(c + r * c_row, acc[r][0]), L::Store(c + r * c_row + L::kCount, acc[r][1]);
    }
  }

  // The tile of 1 to kRows rows.
  template <int64_t kRow, int64_t kStep>
  static void Multiply(int64_t rows, const float* a, const float* b, int64_t b_step, int64_t K, float* c, int64_t c_row,
                       bool adds) {
    constexpr auto tile = [](auto... r) { return std::array<Tile, sizeof...(r)>{&MultiplyTile<r + 1, kRow, kStep>...}; };
    static constexpr auto kBySize = Unpacked(tile, std::make_integer_sequence<int, kRows>());
    kBySize[rows - 1](a, b, b_step, K, c, c_row, adds);
  }

  // Writes a panel [K][kWide] of `count` rows of K numbers, which are `apart` numbers apart; the others are zeros.
  template <int64_t kWide, typename X>
  static void Pack(const X* from, int64_t apart, int64_t count, int64_t K, float scale, float* to) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t k = 0; k < K; ++k) to[k * kWide + i] = ToFloat(from[i * apart + k]) * scale;
    }
    for (int64_t i = count; i < kWide; ++i) {
      for (int64_t k = 0; k < K; ++k) to[k * kWide + i] = 0.0f;
    }
  }

  // What comes into the cache meanwhile: `at_once` lines with each tile, from `from` to the one at `last`.
  struct Ahead {
    const char *from, *last;
    int64_t at_once;

    void Fetch() {
      for (int64_t i = 0; i < at_once; ++i, from = std::min(from + kCacheLine, last)) PrefetchL2(from);
    }
  };

  // Tiles of `rows` rows, one after another: `count` panels a, a_apart floats apart, meet one panel b. c[rows][kCols] of each, c_apart
  // floats apart, becomes c + (c' + (... + a . b)) over `waiting` tiles, 3 at most, of which each next one lies `apart` floats after
  // the one before; a . b where none waits.
  static void AddUp(int64_t rows, int64_t waiting, int64_t count, const float* a, int64_t a_apart, const float* b, int64_t K, float* c,
                    int64_t c_apart, int64_t apart, Ahead& ahead) {
    constexpr auto tiles = [](auto... r) {
      return std::array<std::array<Tiles, 4>, sizeof...(r)>{
          {{&AddUpTiles<r + 1, 0>, &AddUpTiles<r + 1, 1>, &AddUpTiles<r + 1, 2>, &AddUpTiles<r + 1, 3>}...}};
    };
    static constexpr auto kBySize = Unpacked(tiles, std::make_integer_sequence<int, kRows>());
    kBySize[rows - 1][waiting](count, a, a_apart, b, K, c, c_apart, apart, ahead);
  }

 private:
  using Tile = void (*)(const float*, const float*, int64_t, int64_t, float*, int64_t, bool);
  using Tiles = void (*)(int64_t, const float*, int64_t, const float*, int64_t, float*, int64_t, int64_t, Ahead&);

  template <int R, int64_t kRow>
  [[gnu::always_inline]] static void AccumulateStep(const float* a, const float* b, typename L::Floats (&acc)[R][2]) {
    using Floats = typename L::Floats;
    Floats low = L::Load(b), high = L::Load(b + L::kCount);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      Floats x = L::Set(a[r * kRow]);
      L::AddProduct(acc[r][0], x, low), L::AddProduct(acc[r][1], x, high);
    }
  }

  template <int R, int kWaiting>
  static void AddUpTiles(int64_t count, const float* a, int64_t a_apart, const float* b, int64_t K, float* c, int64_t c_apart,
                         int64_t apart, Ahead& ahead) {
    for (; count > 0; --count, a += a_apart, c += c_apart) {
      ahead.Fetch();
      typename L::Floats acc[R][2];
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = L::Zero();
      Accumulate<R, 1, kRows>(a, b, kCols, K, acc);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          float* to = c + r * kCols + i * L::kCount;
          typename L::Floats sum = acc[r][i];
#pragma GCC unroll 3
          for (int n = kWaiting - 1; n >= 0; --n) sum = L::Add(L::Load(to + n * apart), sum);
          L::Store(to, sum);
        }
      }
    }
  }

  template <typename Make, int... r>
  static constexpr auto Unpacked(Make make, std::integer_sequence<int, r...>) {
    return make(std::integral_constant<int, r>()...);
  }
};

template <typename L, typename X>
void MultiplyPanelsInF32(ffi::ThreadPool& pool, const X* x, const X* w, float* packed, float* y, int64_t T, int64_t N, int64_t E) {
  using P = F32Panels<L>;
  constexpr int64_t kDepth = 256;                  // of a block along E: a panel of w stays in the L1 cache
  constexpr int64_t kRowsAtOnce = 20 * P::kRows;   // of x, which stay in the L2 cache beside
  constexpr int64_t kColsAtOnce = 64;              // of w
  if (T == 0) return;
  int64_t panels = (T + P::kRows - 1) / P::kRows, all = panels * P::kRows;
  // The panels of a block along E follow each other.
  auto panel_of = [&](int64_t e, int64_t panel) { return packed + e * all + panel * P::kRows * std::min(kDepth, E - e); };
  ParallelFor(pool, panels, [&](int64_t panel) {
    int64_t t = panel * P::kRows;
    for (int64_t e = 0; e < E; e += kDepth) {
      P::template Pack<P::kRows>(x + t * E + e, E, std::min(P::kRows, T - t), std::min(kDepth, E - e), 1.0f, panel_of(e, panel));
    }
  });
  // Where there are fewer blocks of columns than threads could take in turn, rows are divided too.
  int64_t blocks = (N + kColsAtOnce - 1) / kColsAtOnce;
  int64_t parts = std::clamp<int64_t>(4 * NumThreads(pool) / blocks, 1, (panels + 19) / 20);
  ParallelFor(pool, blocks * parts, [&](int64_t item) {
    static thread_local Memory memory;
    float* of_w = Scratch<float>(memory, kDepth * kColsAtOnce);
    float edge[P::kRows * P::kCols];  // a tile that is wider than what is left of y
    int64_t first = item / parts * kColsAtOnce, cols = std::min(kColsAtOnce, N - first);
    int64_t begin = panels * (item % parts) / parts, end = panels * (item % parts + 1) / parts;
    for (int64_t e = 0; e < E; e += kDepth) {
      int64_t depth = std::min(kDepth, E - e);
      for (int64_t n = 0; n < cols; n += P::kCols) {
        P::template Pack<P::kCols>(w + (first + n) * E + e, E, std::min(P::kCols, cols - n), depth, 1.0f, of_w + n * depth);
      }
      for (int64_t from = begin; from < end; from += kRowsAtOnce / P::kRows) {
        int64_t to = std::min(end, from + kRowsAtOnce / P::kRows);
        for (int64_t n = 0; n < cols; n += P::kCols) {
          int64_t width = std::min(P::kCols, cols - n);
          for (int64_t panel = from; panel < to; ++panel) {
            int64_t t = panel * P::kRows, rows = std::min(P::kRows, T - t);
            float* out = y + t * N + first + n;
            const float *a = panel_of(e, panel), *b = of_w + n * depth;
            if (width == P::kCols) {
              P::template Multiply<1, P::kRows>(rows, a, b, P::kCols, depth, out, N, e > 0);
              continue;
            }
            for (int64_t r = 0; e > 0 && r < rows; ++r) std::copy_n(out + r * N, width, edge + r * P::kCols);
            P::template Multiply<1, P::kRows>(rows, a, b, P::kCols, depth, edge, P::kCols, e > 0);
            for (int64_t r = 0; r < rows; ++r) std::copy_n(edge + r * P::kCols, width, out + r * N);
          }
        }
      }
    }
  });
}

}  // namespace jpaged
