// Products with AVX-512 in which the lanes of a register are 16 outputs: a few inputs of each, which meet those inputs of a row
// of x in all of its lanes. Weights of rows are transposed for it once for all rows of x, and what they become stays in the L1
// cache; interleaved ones lie so.
//
// A `Kernel` has a form, a kind of scales, an order, kDepth (how many inputs of 48 outputs stay in the cache), an X with the rows
// of x, T of them, and AddTile<R, C>; see integers.cc and e4m3.cc.
#pragma once

#include "lanes.h"

namespace jpaged::avx512 {

constexpr int64_t kCols = 16;                    // outputs in a group, one a lane
constexpr int64_t kGroups = 3;                   // of them in a tile
constexpr int64_t kRows = 4;                     // of x in a tile
constexpr int64_t kTransposedBytes = 24 * 1024;  // of a tile's weights when transposed
constexpr int64_t kPanelInputs = 512 * 1024;     // of x that stay in the L2 cache

// Rows in a tile of x.
inline int64_t TileRows(int64_t T, int64_t tile) { return std::min(kRows, T - tile * kRows); }

// What comes from memory while products are at work: so many bytes of each of `rows`, so many lines a block, evenly, or the
// processor waits.
struct Ahead {
  const uint8_t* row;
  int64_t stride, bytes, left, lines, byte = 0;

  Ahead(const uint8_t* from, int64_t stride, int64_t bytes, int64_t rows, int64_t blocks)
      : row(from), stride(stride), bytes(bytes), left(rows * ((bytes + kCacheLine - 1) / kCacheLine)) {
    lines = (left + blocks - 1) / blocks;
  }

  void Fetch() {
    for (int64_t i = std::min(left, lines); i > 0; --i, --left) {
      PrefetchL2(row + byte);
      if ((byte += kCacheLine) >= bytes) byte = 0, row += stride;
    }
  }
};

// A thread's state of the groups of outputs that it works on.
struct TileState {
  const uint8_t* values[kGroups][kCols];  // where their weights begin, the last one's where there are no more
  alignas(64) uint8_t bytes[kGroups][kTransposedBytes / kGroups];  // the weights of some inputs, transposed
  const float *scales[kGroups], *zeros[kGroups];                   // [S][16]
};

// What comes after the inputs from e on of `rows` outputs. Of one tile it is what lies as far on among the next outputs, as
// memory gives it fastest; of more, the next inputs, since so much of the next outputs would not stay in the cache.
template <typename Kernel>
Ahead Next(const Quantized& w, const uint8_t* outputs, int64_t rows, int64_t e, int64_t tiles) {
  constexpr Form form = Kernel::form;
  constexpr int64_t kDepth = Kernel::kDepth, kTogether = Kernel::order == Order::kInterleaved ? kCols : 1;
  rows /= kTogether;  // those that lie together are one of as many bytes
  auto bytes = [](int64_t inputs) { return kTogether * Bytes(form, inputs); };
  int64_t stride = bytes(w.E), depth = std::min(kDepth, w.E - e), blocks = tiles * depth / kPacked;
  const uint8_t* others = outputs + rows * stride;
  if (tiles == 1) return Ahead(others + rows * bytes(e), 0, rows * bytes(depth), 1, blocks);
  if (depth == w.E - e) return Ahead(others, stride, bytes(std::min(kDepth, w.E)), rows, blocks);
  return Ahead(outputs + bytes(e + depth), stride, bytes(std::min(kDepth, w.E - e - depth)), rows, blocks);
}

// Four bytes in all lanes.
inline __m512i FourBytes(const void* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  __m512i all = _mm512_set1_epi32(bytes);
  asm("" : "+v"(all));  // or compilers load it again for each group
  return all;
}

// Calls put(i, the word i of each output) for the cache line from byte `first` on of each output of a group; zeros past the end
// of w's rows.
template <typename Put>
inline void TransposeLine(const Quantized& w, const uint8_t* const (&group)[kCols], int64_t first, const Put& put) {
  __mmask16 mask = (1ull << std::min(kCacheLine, w.RowBytes() - first) / sizeof(int32_t)) - 1;
  __m512i rows[kCols];
#pragma GCC unroll 16
  for (int64_t j = 0; j < kCols; ++j) rows[j] = _mm512_maskz_loadu_epi32(mask, group[j] + first);
  Transpose(rows, put);
}

// out[s][j] = from[n + j][s]: scales or zeros of a group.
inline void TransposeNumbers(const float* from, const Quantized& w, int64_t n, float* out) {
  for (int64_t s = 0; s < w.S; s += kCols) {
    __m512i rows[kCols];
    for (int64_t j = 0; j < kCols; ++j) {
      const float* row = from + std::min(n + j, w.N - 1) * w.S + s;
      PrefetchL2(row + kGroups * kCols * w.S);  // of the next groups: the hardware prefetcher does not follow so short a stream
      rows[j] = _mm512_maskz_loadu_epi32((1u << std::min(kCols, w.S - s)) - 1, row);
    }
    Transpose(rows, reinterpret_cast<bf16*>(out + s * kCols), 2 * kCols);
  }
}

// One thread's part: the groups [begin, end) of 16 outputs for all rows of x.
template <typename Kernel>
void MultiplyGroups(const typename Kernel::X& x, const Quantized& w, float* y, int64_t begin, int64_t end) {
  constexpr Scales kind = Kernel::kind;
  constexpr decltype(&Kernel::template AddTile<1, 1>) kBySize[kGroups][kRows] = {
      {&Kernel::template AddTile<1, 1>, &Kernel::template AddTile<2, 1>, &Kernel::template AddTile<3, 1>,
       &Kernel::template AddTile<4, 1>},
      {&Kernel::template AddTile<1, 2>, &Kernel::template AddTile<2, 2>, &Kernel::template AddTile<3, 2>,
       &Kernel::template AddTile<4, 2>},
      {&Kernel::template AddTile<1, 3>, &Kernel::template AddTile<2, 3>, &Kernel::template AddTile<3, 3>,
       &Kernel::template AddTile<4, 3>}};
  static thread_local Memory memory, scales, zeros, sums;
  constexpr bool kIsInterleaved = Kernel::order == Order::kInterleaved;
  // Where memory is the limit, the less the sooner is more fetched; of interleaved ones nothing else waits for it.
  int64_t together = x.T > kRows ? kGroups : kIsInterleaved ? 2 : 1;
  int64_t tiles = (x.T + kRows - 1) / kRows, panel = std::min(tiles, std::max<int64_t>(1, kPanelInputs / (kRows * w.E)));
  int64_t numbers = (w.S + kCols - 1) / kCols * kCols * kCols, of_tile = kGroups * kRows * kCols;
  TileState& state = *Scratch<TileState>(memory, 1);
  float* totals = Scratch<float>(sums, panel * of_tile);
  for (int64_t first = 0; first < tiles; first += panel) {
    int64_t last = std::min(tiles, first + panel);
    for (int64_t g = begin; g < end; g += together) {
      int64_t groups = std::min(together, end - g);
      for (int64_t c = 0; c < groups; ++c) {
        int64_t n = (g + c) * kCols;
        if constexpr (kIsInterleaved) {
          state.values[c][0] = w.Row(n), state.scales[c] = w.scales + n * w.S;
          if (kind == Scales::kZeros) state.zeros[c] = w.zeros + n * w.S;
          continue;
        }
        for (int64_t j = 0; j < kCols; ++j) {
          state.values[c][j] = w.Row(std::min(n + j, w.N - 1));
        }
        auto transposed = [&](Memory& memory, const float* from) {
          float* to = Scratch<float>(memory, kGroups * numbers) + c * numbers;
          return TransposeNumbers(from, w, n, to), to;
        };
        state.scales[c] = transposed(scales, w.scales);
        if (kind == Scales::kZeros) state.zeros[c] = transposed(zeros, w.zeros);
      }
      for (int64_t e = 0; e < w.E; e += Kernel::kDepth) {
        Ahead ahead = Next<Kernel>(w, state.values[0][0], groups * kCols, e, last - first);
        for (int64_t tile = first; tile < last; ++tile) {
          auto add = kBySize[groups - 1][TileRows(x.T, tile) - 1];
          add(x, tile, w, e, tile == first, state, ahead, totals + (tile - first) * of_tile);
        }
      }
      for (int64_t tile = first; tile < last; ++tile) {
        const float* from = totals + (tile - first) * of_tile;
        for (int64_t c = 0; c < groups; ++c) {
          int64_t n = (g + c) * kCols;
          __mmask16 cols = w.N - n < kCols ? (1u << (w.N - n)) - 1 : 0xffff;
          for (int64_t t = tile * kRows; t < tile * kRows + TileRows(x.T, tile); ++t, from += kCols) {
            __m512 sum = _mm512_load_ps(from);
            if (kind == Scales::kRow) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(state.scales[c]));
            _mm512_mask_storeu_ps(y + t * w.N + n, cols, sum);
          }
        }
      }
    }
  }
}

// y = x . w^T for all rows of x.
template <typename Kernel>
void MultiplyTransposed(ffi::ThreadPool& pool, const typename Kernel::X& x, const Quantized& w, float* y) {
  int64_t groups = (w.N + kCols - 1) / kCols, items = SharesOf(pool, groups, kGroups);
  ParallelFor(pool, items,
              [&](int64_t item) { MultiplyGroups<Kernel>(x, w, y, groups * item / items, groups * (item + 1) / items); });
}

}  // namespace jpaged::avx512
