// Products of bf16 with AVX-512 bf16; see linear.h and experts.h.
//
// XLA:CPU packs w anew at each call, which is what it spends its time on where rows are few. Here w is read once, in order,
// as it lies. A register of x is 8 rows by 4 inputs, which meet 4 inputs of a row of w in all of its lanes, so that the sums
// of an element are in two lanes at the end; up to 4 such registers and 6 rows of w are a tile of 24 registers of sums. The
// sums of an element run in one order whatever T and its place are, so a row's result does not depend on the batch.
#pragma once

#include "lanes.h"

namespace jpaged::avx512 {

// The sizes differ from those of transposed.h.
namespace bf16_products {

constexpr int64_t kRows = 8, kInputs = 4;  // of x in a register
constexpr int64_t kCols = 6;               // rows of w in a tile
constexpr int64_t kMostRows = 4 * kRows;   // of x in a tile
constexpr int64_t kLineInputs = 32;        // bf16 in a cache line
constexpr int64_t kPanel = 128 * 1024;     // bf16 of x that stay in the L2 cache

inline void Put(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void Put(bf16* to, __m512 x) { PutRounded(to, x); }

// Writes the sums of 8 rows of x and 6 of w, of which `rows` x `cols` go to y. Of a register, lanes 2i and 2i + 1 add up to
// row i.
template <typename Out>
inline void Write(const __m512 (&sums)[kCols], Out* const* y, int64_t rows, int64_t cols) {
  __m512 pairs[kCols / 2];  // quarter i: rows 2i and 2i + 1 of one row of w, then of the next
#pragma GCC unroll 3
  for (int j = 0; j < kCols / 2; ++j) {
    __m512 a = sums[2 * j], b = sums[2 * j + 1];
    pairs[j] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
  }
  Out left[2][kRows / 2][4], right[kRows / 2][2][2];  // of even rows, of odd ones; of both
  Put(&left[0][0][0], _mm512_shuffle_ps(pairs[0], pairs[1], 0x88));
  Put(&left[1][0][0], _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
  Put(&right[0][0][0], _mm512_shuffle_ps(pairs[2], pairs[2], 0xd8));
  for (int64_t i = 0; i < rows; ++i) {
    const Out *four = left[i % 2][i / 2], *two = right[i / 2][i % 2];
    if (cols == kCols) {  // in sizes that are known: a call for each of so few bytes is an eighth of a decode's time
      std::memcpy(y[i], four, 4 * sizeof(Out));
      std::memcpy(y[i] + 4, two, 2 * sizeof(Out));
    } else {
      for (int64_t j = 0; j < cols; ++j) y[i][j] = j < 4 ? four[j] : two[j - 4];
    }
  }
}

// The products of up to R * 8 packed rows of x and 6 rows of w, of which `rows` x `cols` go to y. `next`, unless null: what
// comes after of w is brought into the cache from there on, evenly, or the processor waits for it.
template <int R, typename Out>
inline void MultiplyTile(const bf16* x, const bf16* const (&w)[kCols], int64_t E, const bf16* next, Out* const* y, int64_t rows,
                         int64_t cols) {
  __m512 acc[R][kCols];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 6
    for (int j = 0; j < kCols; ++j) acc[r][j] = _mm512_setzero_ps();
  }
  for (int64_t e = 0; e < E; e += kLineInputs) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kLineInputs; i += kInputs) {
      if (next != nullptr && i < kCols * kInputs) {
        PrefetchL2(next);
        next += kLineInputs;
      }
      __m512bh a[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) a[r] = LoadBf16(x + r * kRows * E + (e + i) * kRows);
#pragma GCC unroll 6
      for (int j = 0; j < kCols; ++j) {
        int64_t four;
        std::memcpy(&four, w[j] + e + i, sizeof(four));
        __m512i b = _mm512_set1_epi64(four);
        asm("" : "+v"(b));  // or compilers load it again for each register of x
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], a[r], (__m512bh)b);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) Write(acc[r], y + r * kRows, std::clamp<int64_t>(rows - r * kRows, 0, kRows), cols);
}

// Eight rows of x, of which the first `rows` are there, as [E/4][8][4]; zeros for the others. x(t) is where row t begins.
template <typename X>
void PackRows(const X& x, int64_t first, int64_t rows, bf16* packed, int64_t E) {
  for (int64_t e = 0; e < E; e += kLineInputs, packed += kRows * kLineInputs) {
    __m512i a[kRows], b[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) a[i] = i < rows ? _mm512_loadu_si512(x(first + i) + e) : _mm512_setzero_si512();
    Transpose(a, b);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) _mm512_storeu_si512(packed + i * kLineInputs, b[i]);
  }
}

// One thread's part of a product: the groups [begin, end) of 6 rows of w for all T packed rows of x. y(t) is where row t of
// the result begins.
template <typename Y>
void MultiplyGroups(const bf16* packed, const Y& y, int64_t T, const bf16* w, int64_t N, int64_t E, int64_t begin,
                    int64_t end) {
  using Out = std::remove_pointer_t<decltype(y(0))>;
  constexpr decltype(&MultiplyTile<1, Out>) kBySize[] = {&MultiplyTile<1, Out>, &MultiplyTile<2, Out>, &MultiplyTile<3, Out>,
                                                         &MultiplyTile<4, Out>};
  int64_t block = std::max(kMostRows, kPanel / E / kMostRows * kMostRows);
  for (int64_t first = 0; first < T; first += block) {
    for (int64_t g = begin; g < end; ++g) {
      int64_t n = g * kCols, cols = std::min(kCols, N - n);
      const bf16* columns[kCols];  // the last one again where there are no more
      for (int64_t j = 0; j < kCols; ++j) columns[j] = w + (n + std::min(j, cols - 1)) * E;
      // The next six rows of w come from memory while these are at work. Past the end of w, fetching does no harm.
      const bf16* next = w + (n + kCols) * E;
      for (int64_t t = first; t < std::min(T, first + block); t += kMostRows, next = nullptr) {
        int64_t rows = std::min(kMostRows, T - t);
        Out* to[kMostRows];
        for (int64_t i = 0; i < rows; ++i) to[i] = y(t + i) + n;
        kBySize[(rows - 1) / kRows](packed + t * E, columns, E, next, to, rows, cols);
      }
    }
  }
}

}  // namespace bf16_products
}  // namespace jpaged::avx512
