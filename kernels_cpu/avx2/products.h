// What products with AVX2 and FMA are made of. XLA:CPU makes f32 of w and packs it anew at each call; here w and x are used
// as they lie: a tile of 3 rows of x and 3 of w is 9 registers of partial sums along E, added up at its end.
#pragma once

#include "lanes.h"

namespace jpaged {

constexpr int64_t kRows = 3, kCols = 3;      // of a tile
constexpr int64_t kFewRows = 64;             // of x, which stay in the cache beside three rows of w
constexpr int64_t kBlockBytes = 192 * 1024;  // of w that stays in the L2 cache while many rows of x pass
constexpr int64_t kLine = 32;                // bf16 in a cache line

inline void Put(float* at, const float* from, int64_t n) { std::memcpy(at, from, n * sizeof(float)); }
inline void Put(bf16* at, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    at[i] = ((bits & 0x7fffffff) > 0x7f800000 ? bits | 0x400000 : rounded) >> 16;
  }
}

// What comes next of w: how many lines of it to bring into the cache, and how many at a time: evenly, or the processor
// waits for them.
struct Ahead {
  const bf16* from;
  int64_t lines, at_once;
};

// The products of R rows of x and 3 rows of w, of which `cols` columns go to y.
template <int R, typename Out>
inline void Tile(const bf16* const (&x)[kRows], const bf16* const (&w)[kCols], int64_t E, Out* const (&y)[kRows],
                 int64_t cols, Ahead ahead) {
  __m256 acc[R][4];  // the fourth stays zero
#pragma GCC unroll 3
  for (int i = 0; i < R; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) acc[i][j] = _mm256_setzero_ps();
  }
  for (int64_t e = 0; e < E; e += 2 * kLanes) {
    for (int64_t n = ahead.at_once; n > 0 && ahead.lines > 0; --n, --ahead.lines) {
      _mm_prefetch((const char*)ahead.from, _MM_HINT_T1);
      ahead.from += kLine;
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m256 b[kCols];
#pragma GCC unroll 3
      for (int j = 0; j < kCols; ++j) b[j] = half == 0 ? Even(Words(w[j] + e)) : Odd(Words(w[j] + e));
#pragma GCC unroll 3
      for (int i = 0; i < R; ++i) {
        __m256 a = half == 0 ? Even(Words(x[i] + e)) : Odd(Words(x[i] + e));
#pragma GCC unroll 3
        for (int j = 0; j < kCols; ++j) acc[i][j] = _mm256_fmadd_ps(a, b[j], acc[i][j]);
      }
    }
  }
#pragma GCC unroll 3
  for (int i = 0; i < R; ++i) {
    float sums[4] = {};
    _mm_storeu_ps(sums, Sums(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
    Put(y[i], sums, cols);
  }
}

// Groups of 3 rows of w [N, E] that few rows of x, or many, pass at a time.
inline int64_t BlockGroups(int64_t E) { return std::max<int64_t>(1, kBlockBytes / (2 * kCols * E)); }

// One thread's part of a product: the groups [begin, end) of w for all T rows of x. x(t) and y(t) are where row t begins.
template <typename X, typename Y>
void MultiplyGroups(const X& x, const Y& y, int64_t T, const bf16* w, int64_t N, int64_t E, int64_t begin, int64_t end) {
  using Out = std::remove_pointer_t<decltype(y(0))>;
  bool is_few = T <= kFewRows;
  int64_t tiles = (T + kRows - 1) / kRows;
  // Few rows all meet a group of w while it is in the cache, and the next one comes from memory meanwhile. Of many rows
  // each three meet a block of groups.
  int64_t block = is_few ? 1 : BlockGroups(E);
  int64_t share = is_few ? (kCols * E / kLine + tiles - 1) / tiles : 0;
  int64_t at_once = (share * 2 * kLanes + E - 1) / E;
  for (int64_t first = begin; first < end; first += block) {
    Ahead ahead{w + (first + block) * kCols * E, share, at_once};  // past the end of w, fetching does no harm
    for (int64_t t = 0; t < T; t += kRows, ahead.from += share * kLine) {
      int64_t rows = std::min(kRows, T - t);
      const bf16* from[kRows];  // the last one again where there are no more
      Out* to[kRows];
      for (int64_t g = first; g < std::min(end, first + block); ++g) {
        int64_t n = g * kCols, cols = std::min(kCols, N - n);
        const bf16* columns[kCols];
        for (int64_t j = 0; j < kCols; ++j) columns[j] = w + (n + std::min(j, cols - 1)) * E;
        for (int64_t i = 0; i < kRows; ++i) from[i] = x(t + std::min(i, rows - 1)), to[i] = y(t + std::min(i, rows - 1)) + n;
        auto tile = rows == 3 ? &Tile<3, Out> : rows == 2 ? &Tile<2, Out> : &Tile<1, Out>;
        tile(from, columns, E, to, cols, ahead);
      }
    }
  }
}

}  // namespace jpaged
