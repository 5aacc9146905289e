// What products with AVX-512 bf16 are made of.
//
// For few rows: XLA:CPU packs w anew at each call, which is what it spends its time on then. Here w is read once, in order:
// a tile of 4 rows of x and 6 of w is 24 registers of partial sums along E, added up at its end. The sums of an element
// run in one order whatever T and its place are, so a row's result does not depend on the batch.
#pragma once

#include <cstring>

#include "lanes.h"

namespace jpaged {

constexpr int64_t kRows = 4, kCols = 6;  // of a tile
constexpr int64_t kLanes = 32;           // bf16 in a register, and in a cache line

inline void Put(float* at, __m512 x) { _mm512_storeu_ps(at, x); }
inline void Put(bf16* at, __m512 x) { _mm256_storeu_si256((__m256i*)at, (__m256i)_mm512_cvtneps_pbh(x)); }

// What comes next of w: how many lines of it to bring into the cache, and how many at a time: evenly, or the processor
// waits for them.
struct Ahead {
  const bf16* from;
  int64_t lines, at_once;
};

// The products of 4 packed rows of x and 6 rows of w, of which `rows` x `cols` go to y.
template <typename Out>
inline void Tile(const bf16* x, const bf16* const (&w)[kCols], int64_t E, Out* const (&y)[kRows], int64_t rows,
                 int64_t cols, Ahead ahead) {
  __m512 acc[kRows][kCols];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 6
    for (int j = 0; j < kCols; ++j) acc[i][j] = _mm512_setzero_ps();
  }
  for (int64_t e = 0; e < E; e += kLanes) {
    for (int64_t n = ahead.at_once; n > 0 && ahead.lines > 0; --n, --ahead.lines) {
      _mm_prefetch((const char*)ahead.from, _MM_HINT_T1);
      ahead.from += kLanes;
    }
    __m512bh b[kCols];
#pragma GCC unroll 6
    for (int j = 0; j < kCols; ++j) b[j] = Load(w[j] + e);
#pragma GCC unroll 4
    for (int i = 0; i < kRows; ++i) {
      __m512bh a = Load(x + kRows * e + kLanes * i);
#pragma GCC unroll 6
      for (int j = 0; j < kCols; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], a, b[j]);
    }
  }
  __m512 left[16], right[16];
#pragma GCC unroll 4
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      left[4 * i + j] = acc[i][j];
      right[4 * i + j] = j < kCols - 4 ? acc[i][4 + j] : _mm512_setzero_ps();
    }
  }
  Out out[2][kRows][4];
  Put(&out[0][0][0], Sums(left));
  Put(&out[1][0][0], Sums(right));
  for (int64_t i = 0; i < rows; ++i) {
    if (cols == kCols) {
      std::memcpy(y[i], out[0][i], 4 * sizeof(Out));
      std::memcpy(y[i] + 4, out[1][i], 2 * sizeof(Out));
    } else {
      for (int64_t j = 0; j < cols; ++j) y[i][j] = out[j / 4][i][j % 4];
    }
  }
}

// Four rows of x, of which the first `rows` are there, as [E/32][4][32]; zeros for the others. x(t) is where row t begins.
template <typename X>
void PackRows(const X& x, int64_t first, int64_t rows, bf16* packed, int64_t E) {
  for (int64_t row = 0; row < kRows; ++row) {
    const bf16* from = row < rows ? x(first + row) : nullptr;
    for (int64_t e = 0; e < E; e += kLanes) {
      __m512i v = row < rows ? _mm512_loadu_si512(from + e) : _mm512_setzero_si512();
      _mm512_storeu_si512(packed + kRows * e + kLanes * row, v);
    }
  }
}

// One thread's part of a product: the groups [begin, end) of 6 rows of w for all T packed rows of x. y(t) is where row t of
// the result begins.
template <typename Y>
void MultiplyGroups(const bf16* packed, const Y& y, int64_t T, const bf16* w, int64_t N, int64_t E, int64_t begin,
                    int64_t end) {
  using Out = std::remove_pointer_t<decltype(y(0))>;
  int64_t tiles = (T + kRows - 1) / kRows;
  int64_t share = (kCols * E / kLanes + tiles - 1) / tiles, at_once = (share * kLanes + E - 1) / E;
  for (int64_t g = begin; g < end; ++g) {
    int64_t n = g * kCols, cols = std::min(kCols, N - n);
    const bf16* columns[kCols];  // the last one again where there are no more
    for (int64_t j = 0; j < kCols; ++j) columns[j] = w + (n + std::min(j, cols - 1)) * E;
    // The next six rows of w come from memory while these are at work. Past the end of w, fetching does no harm.
    Ahead ahead{w + (n + kCols) * E, share, at_once};
    for (int64_t t = 0; t < T; t += kRows, ahead.from += share * kLanes) {
      int64_t rows = std::min(kRows, T - t);
      Out* to[kRows];  // the last one again where there are no more
      for (int64_t i = 0; i < kRows; ++i) to[i] = y(t + std::min(i, rows - 1)) + n;
      Tile(packed + t * E, columns, E, to, rows, cols, ahead);
    }
  }
}

}  // namespace jpaged
