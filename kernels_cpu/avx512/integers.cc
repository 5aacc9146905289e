// Products with weights of int8 and int4 by VNNI, which multiplies bytes without a sign (weights, plus what makes them so) by
// bytes with one: x, of which each 32 inputs of a row are rounded to a 127th of the largest of them.
//
// A register is 4 inputs each of 16 outputs, for which weights are turned once for all rows, and meets 4 inputs of a row of x
// in all of its lanes. Sums of integers are exact up to where a scale of x ends; they are added up in f32, in one order, from
// there on, so that a row's bits do not depend on the others.
#include "../integers.h"

#include <cstring>

#include "lanes.h"

namespace jpaged {
namespace {

constexpr int64_t kCols = 16;      // outputs in a group, one a lane
constexpr int64_t kGroups = 3;     // of them in a tile
constexpr int64_t kRows = 4;       // of x in a tile
constexpr int64_t kInputs = 4;     // of a lane
constexpr int64_t kBlock = 32;     // inputs that share a scale of x; whole blocks share one of w
constexpr int64_t kLine = 64;      // bytes in a cache line: of each output's weights so many are turned at a time
constexpr int64_t kDepth = 512;    // inputs whose bytes stay in the L1 cache
constexpr int64_t kPanel = 512 * 1024;  // bytes of x that stay in the L2 cache
constexpr float kMost = 127.0f;
constexpr float kNothing = 1e-30f;  // what is below is zero: its scale would have no inverse

// What the bytes of a form have in excess.
constexpr int32_t Excess(Form form) { return form == Form::kInt4 ? 8 : 128; }

// Inputs that are turned at a time.
constexpr int64_t Turned(Form form) { return form == Form::kInt4 ? 2 * kLine : kLine; }

constexpr int64_t Bytes(Form form, int64_t inputs) { return form == Form::kInt4 ? inputs / 2 : inputs; }

// Rows of x in tiles of up to 4, one after the other. Of a tile of R rows: values [E / 4][R][4]; and [E / 32][R] of each block
// its scale, what the excess of w adds to its sums, to be taken from them, and what a zero of w takes: its sum and scale.
struct Integers {
  int8_t* values;
  float* scales;
  int32_t* excess;
  float* sums;
  int64_t T, E;

  int64_t Rows(int64_t tile) const { return std::min(kRows, T - tile * kRows); }
};

inline __m512 Floats(const bf16* at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}

// Row `row` of a tile of `rows` from x. NaN or infinity makes a block's scale so.
void ToIntegers(const bf16* x, const Integers& to, int64_t tile, int64_t row, int32_t excess) {
  int64_t rows = to.Rows(tile);
  int8_t* values = to.values + tile * kRows * to.E + row * kInputs;
  for (int64_t e = 0; e < to.E; e += kBlock) {
    // Of bits without a sign the larger number has the larger, NaN the largest.
    __m512i most = _mm512_and_si512(_mm512_loadu_si512(x + e), _mm512_set1_epi16(0x7fff));
    __m512i odd = _mm512_srli_epi32(most, 16), even = _mm512_and_si512(most, _mm512_set1_epi32(0xffff));
    uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(odd, even)) << 16;
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    bool is_zero = largest < kNothing;
    float scale = is_zero ? 0.0f : largest / kMost;
    __m512 inverse = _mm512_set1_ps(is_zero ? 0.0f : kMost / largest);
    __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(Floats(x + e), inverse));
    __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(Floats(x + e + kBlock / 2), inverse));
    alignas(16) int8_t bytes[kBlock];
    _mm_store_si128((__m128i*)bytes, _mm512_cvtepi32_epi8(low));
    _mm_store_si128((__m128i*)(bytes + kBlock / 2), _mm512_cvtepi32_epi8(high));
    for (int64_t i = 0; i < kBlock; i += kInputs) std::memcpy(values + (e + i) * rows, bytes + i, kInputs);
    int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    int64_t at = (tile * kRows * to.E + e * rows) / kBlock + row;
    to.scales[at] = scale;
    to.excess[at] = -excess * sum;
    to.sums[at] = -scale * static_cast<float>(sum);
  }
}

// The line from byte `at` on of each output of a group, of whose words `mask` has those that are there, as bytes without a
// sign: [inputs / 4][16 outputs][4].
template <Form form>
void Turn(const uint8_t* const (&group)[kCols], int64_t at, __mmask16 mask, uint8_t* to) {
  __m512i rows[kCols];
#pragma GCC unroll 16
  for (int64_t j = 0; j < kCols; ++j) rows[j] = _mm512_maskz_loadu_epi32(mask, group[j] + at);
  Transpose(rows, [&](int64_t word, __m512i bytes) {
    if constexpr (form == Form::kInt8) {
      _mm512_storeu_si512(to + word * kLine, _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80))));
    } else {  // a byte holds the values i and i + 16 of its 32
      const __m512i four = _mm512_set1_epi8(15);
      uint8_t* low = to + (word / 4 * 8 + word % 4) * kLine;
      _mm512_storeu_si512(low, _mm512_and_si512(bytes, four));
      _mm512_storeu_si512(low + 4 * kLine, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), four));
    }
  });
}

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
  const uint8_t* values[kGroups][kCols];            // where their weights begin, the last one's again where there are no more
  alignas(64) uint8_t bytes[kGroups][kDepth * kCols];  // of some inputs, [inputs / 4][16][4]
  float *scales[kGroups], *zeros[kGroups];          // [S][16]
};

// What comes after the inputs from e on of `rows` outputs. Of one tile it is what lies as far on among the next outputs, as
// memory gives it fastest; of more, the next inputs, since so much of the next outputs would not stay in the cache.
template <Form form>
Ahead Next(const Quantized& w, const uint8_t* outputs, int64_t rows, int64_t e, int64_t tiles) {
  int64_t stride = Bytes(form, w.E), depth = std::min(kDepth, w.E - e), blocks = tiles * depth / kBlock;
  const uint8_t* others = outputs + rows * stride;
  if (tiles == 1) return Ahead(others + rows * Bytes(form, e), 0, rows * Bytes(form, depth), 1, blocks);
  if (depth == w.E - e) return Ahead(others, stride, Bytes(form, std::min(kDepth, w.E)), rows, blocks);
  return Ahead(outputs + Bytes(form, e + depth), stride, Bytes(form, std::min(kDepth, w.E - e - depth)), rows, blocks);
}

inline __m512i Four(const int8_t* at) {
  int32_t bytes;
  std::memcpy(&bytes, at, sizeof(bytes));
  __m512i all = _mm512_set1_epi32(bytes);
  asm("" : "+v"(all));  // or compilers load it again for each group
  return all;
}

// Adds the products of a tile of R rows of x and C groups over up to kDepth inputs from `first` on to their sums, [C][R][16].
// The first tile makes the bytes as it goes.
template <Form form, Scales kind, int R, int C>
void Tile(const Integers& x, int64_t tile, const Quantized& w, int64_t first, bool is_first, Own& own, Ahead& ahead,
          float* to) {
  const int8_t* values = x.values + tile * kRows * x.E;
  int64_t block = (tile * kRows * x.E + first * R) / kBlock, size = w.E / w.S, g = first / size;
  __m512 totals[C][R];
#pragma GCC unroll 3
  for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) totals[c][r] = first == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to + (c * R + r) * kCols);
  }
  for (int64_t e = first; e < std::min(w.E, first + kDepth); e += kBlock, block += R) {
    int64_t at = (e - first) * kCols;
    if (e == (g + 1) * size) ++g;
    if (is_first && e % Turned(form) == 0) {
      __mmask16 mask = (1ull << std::min(kLine, Bytes(form, x.E - e)) / sizeof(int32_t)) - 1;
      for (int c = 0; c < C; ++c) Turn<form>(own.values[c], Bytes(form, e), mask, own.bytes[c] + at);
    }
    ahead.Fetch();
    __m512i sums[C][R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __m512i excess = _mm512_set1_epi32(x.excess[block + r]);
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) sums[c][r] = excess;
    }
#pragma GCC unroll 8
    for (int64_t i = 0; i < kBlock; i += kInputs) {
      __m512i weights[C];
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) weights[c] = _mm512_loadu_si512(own.bytes[c] + at + i * kCols);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        __m512i four = Four(values + (e + i) * R + r * kInputs);
#pragma GCC unroll 3
        for (int c = 0; c < C; ++c) sums[c][r] = _mm512_dpbusd_epi32(sums[c][r], weights[c], four);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __m512 of_x = _mm512_set1_ps(x.scales[block + r]);
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) {
        __m512 number = _mm512_cvtepi32_ps(sums[c][r]);
        if constexpr (kind == Scales::kRow) {
          totals[c][r] = _mm512_fmadd_ps(number, of_x, totals[c][r]);
        } else {
          number = _mm512_mul_ps(number, of_x);
          if constexpr (kind == Scales::kZeros) {
            number = _mm512_fmadd_ps(_mm512_loadu_ps(own.zeros[c] + g * kCols), _mm512_set1_ps(x.sums[block + r]), number);
          }
          totals[c][r] = _mm512_fmadd_ps(number, _mm512_loadu_ps(own.scales[c] + g * kCols), totals[c][r]);
        }
      }
    }
  }
#pragma GCC unroll 3
  for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) _mm512_store_ps(to + (c * R + r) * kCols, totals[c][r]);
  }
}

// out[s][j] = from[n + j][s]: scales or zeros of a group.
void TurnNumbers(const float* from, const Quantized& w, int64_t n, float* out) {
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
template <Form form, Scales kind>
void MultiplyGroups(const Integers& x, const Quantized& w, float* y, int64_t begin, int64_t end) {
  constexpr decltype(&Tile<form, kind, 1, 1>) kBySize[kGroups][kRows] = {
      {&Tile<form, kind, 1, 1>, &Tile<form, kind, 2, 1>, &Tile<form, kind, 3, 1>, &Tile<form, kind, 4, 1>},
      {&Tile<form, kind, 1, 2>, &Tile<form, kind, 2, 2>, &Tile<form, kind, 3, 2>, &Tile<form, kind, 4, 2>},
      {&Tile<form, kind, 1, 3>, &Tile<form, kind, 2, 3>, &Tile<form, kind, 3, 3>, &Tile<form, kind, 4, 3>}};
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
      for (int64_t e = 0; e < w.E; e += kDepth) {
        Ahead ahead = Next<form>(w, own.values[0][0], groups * kCols, e, last - first);
        for (int64_t tile = first; tile < last; ++tile) {
          auto add = kBySize[groups - 1][x.Rows(tile) - 1];
          add(x, tile, w, e, tile == first, own, ahead, totals + (tile - first) * of_tile);
        }
      }
      for (int64_t tile = first; tile < last; ++tile) {
        const float* from = totals + (tile - first) * of_tile;
        for (int64_t c = 0; c < groups; ++c) {
          int64_t n = (g + c) * kCols;
          __mmask16 cols = w.N - n < kCols ? (1u << (w.N - n)) - 1 : 0xffff;
          for (int64_t t = tile * kRows; t < tile * kRows + x.Rows(tile); ++t, from += kCols) {
            __m512 sum = _mm512_load_ps(from);
            if (kind == Scales::kRow) sum = _mm512_mul_ps(sum, _mm512_loadu_ps(own.scales[c]));
            _mm512_mask_storeu_ps(y + t * w.N + n, cols, sum);
          }
        }
      }
    }
  }
}

template <Form form, Scales kind>
void MultiplyAs(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  static thread_local std::vector<Line> values, scales, excess, sums;
  int64_t blocks = T * w.E / kBlock;
  Integers from{Room<int8_t>(values, T * w.E), Room<float>(scales, blocks), Room<int32_t>(excess, blocks),
                Room<float>(sums, blocks), T, w.E};
  ParallelFor(pool, (T + kRows - 1) / kRows, [&](int64_t tile) {
    for (int64_t row = 0; row < from.Rows(tile); ++row) {
      ToIntegers(x + (tile * kRows + row) * w.E, from, tile, row, Excess(form));
    }
  });
  int64_t groups = (w.N + kCols - 1) / kCols;
  // Several items a thread: one that begins late is not waited for long.
  int64_t items = std::clamp<int64_t>(8 * pool.num_threads(), 1, (groups + kGroups - 1) / kGroups);
  ParallelFor(pool, items, [&](int64_t item) {
    MultiplyGroups<form, kind>(from, w, y, groups * item / items, groups * (item + 1) / items);
  });
}
}  // namespace

void MultiplyIntegers(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  WithKind(w, [&](auto is) { MultiplyAs<decltype(is)::form, decltype(is)::kind>(pool, x, w, y, T); });
}
}  // namespace jpaged
