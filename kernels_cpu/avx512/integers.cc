// Products with weights of int8 and int4 by VNNI, which multiplies bytes without a sign (weights, plus what makes them so) by
// bytes with one: x, of which each 32 inputs of a row are rounded to a 127th of the largest of them.
//
// A register is 4 inputs each of 16 outputs, for which weights are transposed once for all rows, and meets 4 inputs of a row of
// x in all of its lanes. Sums of integers are exact up to where a scale of x ends; they are added up in f32, in one order, from
// there on, so that a row's bits do not depend on the others.
#include "level.h"
#include "transposed.h"

namespace jpaged::avx512 {
namespace {

constexpr int64_t kInputs = 4;  // of a lane
constexpr float kMost = 127.0f;

// What the bytes of a form have in excess.
constexpr int32_t Excess(Form form) { return form == Form::kInt4 ? 8 : 128; }

// Rows of x in tiles of up to 4, one after the other. Of a tile of R rows: values [E / 4][R][4]; and of each block, [E /
// 32][R], its scale, what takes the excess of w from its sums, and what a zero of 1 takes: minus the scale times the sum.
struct RoundedRows {
  int8_t* values;
  float* scales;
  int32_t* excess;
  float* sums;
  int64_t T, E;
};

// Rounds a row of x, row `row` of a tile. NaN or infinity makes a block's scale so.
void Round(const bf16* x, const RoundedRows& to, int64_t tile, int64_t row, int32_t excess) {
  int64_t rows = TileRows(to.T, tile);
  int8_t* values = to.values + tile * kRows * to.E + row * kInputs;
  for (int64_t e = 0; e < to.E; e += kPacked) {
    // Bits without a sign are in the order of numbers, NaN the largest.
    __m512i most = _mm512_and_si512(_mm512_loadu_si512(x + e), _mm512_set1_epi16(0x7fff));
    __m512i odd = _mm512_srli_epi32(most, 16), even = _mm512_and_si512(most, _mm512_set1_epi32(0xffff));
    uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(odd, even)) << 16;
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    float scale = largest / kMost;
    __m512 inverse = _mm512_set1_ps(largest < kNothing ? 0.0f : kMost / largest);
    __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(Lanes::FromBf16(x + e), inverse));
    __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(Lanes::FromBf16(x + e + kPacked / 2), inverse));
    alignas(16) int8_t bytes[kPacked];
    _mm_store_si128((__m128i*)bytes, _mm512_cvtepi32_epi8(low));
    _mm_store_si128((__m128i*)(bytes + kPacked / 2), _mm512_cvtepi32_epi8(high));
    for (int64_t i = 0; i < kPacked; i += kInputs) std::memcpy(values + (e + i) * rows, bytes + i, kInputs);
    int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
    int64_t block = (tile * kRows * to.E + e * rows) / kPacked + row;
    to.scales[block] = scale;
    to.excess[block] = -excess * sum;
    to.sums[block] = -scale * static_cast<float>(sum);
  }
}

// The cache line from byte `first` on of each output of a group as bytes without a sign: [inputs / 4][16 outputs][4].
template <Form form>
void TransposeBytes(const Quantized& w, const uint8_t* const (&group)[kCols], int64_t first, uint8_t* to) {
  TransposeLine(w, group, first, [&](int64_t word, __m512i bytes) {
    if constexpr (form == Form::kInt8) {
      _mm512_storeu_si512(to + word * kCacheLine, _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80))));
    } else {  // a byte holds the values i and i + 16 of its 32
      const __m512i four = _mm512_set1_epi8(15);
      uint8_t* low = to + (word / 4 * 8 + word % 4) * kCacheLine;
      _mm512_storeu_si512(low, _mm512_and_si512(bytes, four));
      _mm512_storeu_si512(low + 4 * kCacheLine, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), four));
    }
  });
}

// Inputs e to e + 31 of interleaved int4 as bytes in the same order.
inline void UnpackHalves(const uint8_t* group, int64_t e, uint8_t* to) {
  const __m512i four = _mm512_set1_epi8(15);
  for (int64_t i = 0; i < kPacked; i += 2 * kInputs, to += 2 * kCacheLine) {
    __m512i bytes = _mm512_loadu_si512(group + (e + i) / (2 * kInputs) * kCacheLine);
    _mm512_storeu_si512(to, _mm512_and_si512(bytes, four));
    _mm512_storeu_si512(to + kCacheLine, _mm512_and_si512(_mm512_srli_epi16(bytes, 4), four));
  }
}

// keeps: the first tile of x makes bytes of the weights, which stay in the cache for the others; or each tile reads them as they lie.
template <Form form_, Scales kind_, Order order_, bool keeps>
struct IntegerKernel {
  using X = RoundedRows;
  static constexpr Form form = form_;
  static constexpr Scales kind = kind_;
  static constexpr Order order = order_;
  static constexpr int64_t kDepth = kTransposedBytes / kGroups / kCols;

  // Inputs e + i to e + i + 3 of each output of a group as bytes without a sign.
  static __m512i Weights(const TileState& state, int c, int64_t first, int64_t e, int64_t i) {
    if constexpr (keeps) {
      return _mm512_loadu_si512(state.bytes[c] + (e - first + i) * kCols);
    } else if constexpr (form == Form::kInt8) {
      return _mm512_loadu_si512(state.values[c][0] + (e + i) * kCols);
    } else {  // a line has 8 inputs, in the lower bits and in the upper ones
      const __m512i four = _mm512_set1_epi8(15);
      __m512i bytes = _mm512_loadu_si512(state.values[c][0] + (e + i) / 8 * kCacheLine);
      return _mm512_and_si512(i % 8 == 0 ? bytes : _mm512_srli_epi16(bytes, 4), four);
    }
  }

  // Adds the products of a tile of R rows of x and C groups over up to kDepth inputs from `first` on to their sums, [C][R][16].
  template <int R, int C>
  static void AddTile(const RoundedRows& x, int64_t tile, const Quantized& w, int64_t first, bool is_first, TileState& state,
                      Ahead& ahead, float* to) {
    const int8_t* values = x.values + tile * kRows * x.E;
    int64_t block = (tile * kRows * x.E + first * R) / kPacked, size = w.E / w.S, g = first / size;
    __m512 totals[C][R];
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) totals[c][r] = first == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to + (c * R + r) * kCols);
    }
    for (int64_t e = first; e < std::min(w.E, first + kDepth); e += kPacked, block += R) {
      int64_t byte = (e - first) * kCols;
      if (e == (g + 1) * size) ++g;
      if (keeps && is_first) {
        for (int c = 0; c < C; ++c) {
          if constexpr (order == Order::kInterleaved) {
            UnpackHalves(state.values[c][0], e, state.bytes[c] + byte);
          } else if (Bytes(form, e) % kCacheLine == 0) {
            TransposeBytes<form>(w, state.values[c], Bytes(form, e), state.bytes[c] + byte);
          }
        }
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
      for (int64_t i = 0; i < kPacked; i += kInputs) {
        __m512i weights[C];
#pragma GCC unroll 3
        for (int c = 0; c < C; ++c) weights[c] = Weights(state, c, first, e, i);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          __m512i four = FourBytes(values + (e + i) * R + r * kInputs);
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
              number = _mm512_fmadd_ps(_mm512_loadu_ps(state.zeros[c] + g * kCols), _mm512_set1_ps(x.sums[block + r]), number);
            }
            totals[c][r] = _mm512_fmadd_ps(number, _mm512_loadu_ps(state.scales[c] + g * kCols), totals[c][r]);
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
};

template <Form form, Scales kind, Order order, bool keeps>
void MultiplyAs(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  static thread_local Memory values, scales, excess, sums;
  int64_t blocks = T * w.E / kPacked;
  RoundedRows from{Scratch<int8_t>(values, T * w.E),
                   Scratch<float>(scales, blocks),
                   Scratch<int32_t>(excess, blocks),
                   Scratch<float>(sums, blocks),
                   T,
                   w.E};
  ParallelFor(pool, (T + kRows - 1) / kRows, [&](int64_t tile) {
    for (int64_t row = 0; row < TileRows(T, tile); ++row) {
      Round(x + (tile * kRows + row) * w.E, from, tile, row, Excess(form));
    }
  });
  MultiplyTransposed<IntegerKernel<form, kind, order, keeps>>(pool, from, w, y);
}
}  // namespace

void MultiplyInt8(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  WithIntegral(w, [&](auto weight) {
    using Weight = decltype(weight);
    if (w.order == Order::kRows) return MultiplyAs<Weight::form, Weight::kind, Order::kRows, true>(pool, x, w, y, T);
    if constexpr (Weight::form == Form::kInt4) {  // of several tiles, each would take the halves of bytes apart
      if (T > kRows) return MultiplyAs<Weight::form, Weight::kind, Order::kInterleaved, true>(pool, x, w, y, T);
    }
    MultiplyAs<Weight::form, Weight::kind, Order::kInterleaved, false>(pool, x, w, y, T);
  });
}

}  // namespace jpaged::avx512
