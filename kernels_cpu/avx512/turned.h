// Products with AVX-512 in which the lanes of a register are 16 outputs: a few inputs of each, which meet those inputs of a row
// of x in all of its lanes. Weights are turned for it once for all rows, and what they become stays in the L1 cache.
//
// A `Way` has a form, a kind of scales, kDepth inputs of 48 outputs that stay in the cache, an X with the rows of x, T of them,
// and a Tile; see integers.cc and floats.cc.
#pragma once

#include <cstring>

#include "../integers.h"
#include "lanes.h"

namespace jpaged {

constexpr int64_t kCols = 16;           // outputs in a group, one a lane
constexpr int64_t kGroups = 3;          // of them in a tile
constexpr int64_t kRows = 4;            // of x in a tile
constexpr int64_t kBlock = 32;          // inputs of which whole ones share a scale of w
constexpr int64_t kLine = 64;           // bytes in a cache line: of each output's weights so many are turned at a time
constexpr int64_t kTurned = 24 * 1024;  // bytes of a tile's weights when turned
constexpr int64_t kPanel = 512 * 1024;  // inputs of x that stay in the L2 cache

constexpr int64_t Bytes(Form form, int64_t inputs) { return form == Form::kInt4 ? inputs / 2 : inputs; }

// Rows in a tile of x.
inline int64_t TileRows(int64_t T, int64_t tile) { return std::min(kRows, T - tile * kRows); }

// What comes from memory while products are at work: so many bytes of each of `rows`, so many lines a block, evenly, or the
// processor waits.
struct Ahead {
  const uint8_t* row;
  int64_t stride, bytes, left, lines, at = 0;

  Ahead(const uint8_t* from, int64_t stride, int64_t bytes, int64_t rows, int64_t blocks)
      : row(from), stride(stride), bytes(bytes), left(rows * ((bytes + kLine - 1) / kLine)) {
    lines = (left + blocks - 1) / blocks;
  }

  void Fetch() {
    for (int64_t i = std::min(left, lines); i > 0; --i, --left) {
      _mm_prefetch((const char*)row + at, _MM_HINT_T1);
      if ((at += kLine) >= bytes) at = 0, row += stride;
    }
  }
};

// What a thread has of the groups that it is at.
struct Own {
  const uint8_t* values[kGroups][kCols];                  // where their weights begin, the last one's where there are no more
  alignas(64) uint8_t bytes[kGroups][kTurned / kGroups];  // what the weights of some inputs became
  float *scales[kGroups], *zeros[kGroups];                // [S][16]
};

// What comes after the inputs from e on of `rows` outputs. Of one tile it is what lies as far on among the next outputs, as
// memory gives it fastest; of more, the next inputs, since so much of the next outputs would not stay in the cache.
template <typename Way>
Ahead Next(const Quantized& w, const uint8_t* outputs, int64_t rows, int64_t e, int64_t tiles) {
  constexpr Form form = Way::form;
  constexpr int64_t kDepth = Way::kDepth;
  int64_t stride = Bytes(form, w.E), depth = std::min(kDepth, w.E - e), blocks = tiles * depth / kBlock;
  const uint8_t* others = outputs + rows * stride;
  if (tiles == 1) return Ahead(others + rows * Bytes(form, e), 0, rows * Bytes(form, depth), 1, blocks);
  if (depth == w.E - e) return Ahead(others, stride, Bytes(form, std::min(kDepth, w.E)), rows, blocks);
  return Ahead(outputs + Bytes(form, e + depth), stride, Bytes(form, std::min(kDepth, w.E - e - depth)), rows, blocks);
}

inline __m512i Four(const void* at) {
  int32_t bytes;
  std::memcpy(&bytes, at, sizeof(bytes));
  __m512i all = _mm512_set1_epi32(bytes);
  asm("" : "+v"(all));  // or compilers load it again for each group
  return all;
}

// Words of the line from byte `at` on of each output of a group, put(i, word i of each), zeros past the end of w's rows.
template <typename Put>
inline void Turn(const Quantized& w, const uint8_t* const (&group)[kCols], int64_t at, const Put& put) {
  __mmask16 mask = (1ull << std::min(kLine, Bytes(w.form, w.E) - at) / sizeof(int32_t)) - 1;
  __m512i rows[kCols];
#pragma GCC unroll 16
  for (int64_t j = 0; j < kCols; ++j) rows[j] = _mm512_maskz_loadu_epi32(mask, group[j] + at);
  Transpose(rows, put);
}

// out[s][j] = from[n + j][s]: scales or zeros of a group.
inline void TurnNumbers(const float* from, const Quantized& w, int64_t n, float* out) {
  for (int64_t s = 0; s < w.S; s += kCols) {
    __m512i rows[kCols];
    for (int64_t j = 0; j < kCols; ++j) {  // those of the next groups are fetched: no one else sees a stream in so few
      const float* at = from + std::min(n + j, w.N - 1) * w.S + s;
      _mm_prefetch((const char*)(at + kGroups * kCols * w.S), _MM_HINT_T1);
      rows[j] = _mm512_maskz_loadu_epi32((1u << std::min(kCols, w.S - s)) - 1, at);
    }
    Transpose(rows, reinterpret_cast<bf16*>(out + s * kCols), 2 * kCols);
  }
}

// One thread's part: the groups [begin, end) of 16 outputs for all rows of x.
template <typename Way>
void MultiplyGroups(const typename Way::X& x, const Quantized& w, float* y, int64_t begin, int64_t end) {
  constexpr Form form = Way::form;
  constexpr Scales kind = Way::kind;
  constexpr decltype(&Way::template Tile<1, 1>) kBySize[kGroups][kRows] = {
      {&Way::template Tile<1, 1>, &Way::template Tile<2, 1>, &Way::template Tile<3, 1>, &Way::template Tile<4, 1>},
      {&Way::template Tile<1, 2>, &Way::template Tile<2, 2>, &Way::template Tile<3, 2>, &Way::template Tile<4, 2>},
      {&Way::template Tile<1, 3>, &Way::template Tile<2, 3>, &Way::template Tile<3, 3>, &Way::template Tile<4, 3>}};
  static thread_local std::vector<Line> memory, scales, zeros, sums;
  int64_t together = x.T <= kRows ? 1 : kGroups;  // where memory is the limit, the less the sooner is more fetched
  int64_t tiles = (x.T + kRows - 1) / kRows, panel = std::min(tiles, std::max<int64_t>(1, kPanel / (kRows * w.E)));
  int64_t numbers = (w.S + kCols - 1) / kCols * kCols * kCols, of_tile = kGroups * kRows * kCols;
  Own& own = *Room<Own>(memory, 1);
  for (int64_t c = 0; c < kGroups; ++c) {
    own.scales[c] = Room<float>(scales, kGroups * numbers) + c * numbers;
    own.zeros[c] = Room<float>(zeros, kGroups * numbers) + c * numbers;
  }
  float* totals = Room<float>(sums, panel * of_tile);
  for (int64_t first = 0; first < tiles; first += panel) {
    int64_t last = std::min(tiles, first + panel);
    for (int64_t g = begin; g < end; g += together) {
      int64_t groups = std::min(together, end - g);
      for (int64_t c = 0; c < groups; ++c) {
        int64_t n = (g + c) * kCols;
        for (int64_t j = 0; j < kCols; ++j) {
          own.values[c][j] = static_cast<const uint8_t*>(w.values) + std::min(n + j, w.N - 1) * Bytes(form, w.E);
        }
        TurnNumbers(w.scales, w, n, own.scales[c]);
        if (kind == Scales::kZeros) TurnNumbers(w.zeros, w, n, own.zeros[c]);
      }
      for (int64_t e = 0; e < w.E; e += Way::kDepth) {
        Ahead ahead = Next<Way>(w, own.values[0][0], groups * kCols, e, last - first);
        for (int64_t tile = first; tile < last; ++tile) {
          auto add = kBySize[groups - 1][TileRows(x.T, tile) - 1];
          add(x, tile, w, e, tile == first, own, ahead, totals + (tile - first) * of_tile);
        }
      }
      for (int64_t tile = first; tile < last; ++tile) {
        const float* from = totals + (tile - first) * of_tile;
        for (int64_t c = 0; c < groups; ++c) {
          int64_t n = (g + c) * kCols;
          __mmask16 cols = w.N - n < kCols ? (1u << (w.N - n)) - 1 : 0xffff;
          for (int64_t t = tile * kRows; t < tile * kRows + TileRows(x.T, tile); ++t, from += kCols) {
            __m512 sum = _mm512_load_ps(from);
            if (kind == Scales::kRow) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(own.scales[c]));
            _mm512_mask_storeu_ps(y + t * w.N + n, cols, sum);
          }
        }
      }
    }
  }
}

// y = x . w^T for all rows of x.
template <typename Way>
void MultiplyTurned(ffi::ThreadPool& pool, const typename Way::X& x, const Quantized& w, float* y) {
  int64_t groups = (w.N + kCols - 1) / kCols;
  // Several items a thread: one that begins late is not waited for long.
  int64_t items = std::clamp<int64_t>(8 * pool.num_threads(), 1, (groups + kGroups - 1) / kGroups);
  ParallelFor(pool, items, [&](int64_t item) {
    MultiplyGroups<Way>(x, w, y, groups * item / items, groups * (item + 1) / items);
  });
}

}  // namespace jpaged
