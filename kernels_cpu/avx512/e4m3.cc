// Products with weights of e4m3 with AVX-512 bf16: they are transposed and become bf16, which holds them, in the cache. A
// register is 2 inputs each of 16 outputs, which meet 2 inputs of a row of x in all of its lanes. Scales come after the sums of
// their inputs.
#include "level.h"
#include "transposed.h"

namespace jpaged::avx512 {
namespace {

struct Rows {
  const bf16* values;  // [T, E]
  int64_t T, E;
};

template <Scales kind_>
struct E4m3Kernel {
  using X = Rows;
  static constexpr Form form = Form::kE4m3;
  static constexpr Scales kind = kind_;
  static constexpr Order order = Order::kRows;
  static constexpr int64_t kDepth = kTransposedBytes / kGroups / kCols / sizeof(bf16);

  // The cache line from input e on of each output of a group: [inputs / 2][16 outputs][2].
  static void Put(const Quantized& w, const uint8_t* const (&group)[kCols], int64_t e, uint8_t* to) {
    const __m512i low = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
    const __m512i high = _mm512_broadcast_i32x4(_mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1));
    TransposeLine(w, group, e, [&](int64_t word, __m512i bytes) {
      _mm512_store_si512(to + 2 * word * kCacheLine, Widener::FromE4m3(_mm512_shuffle_epi8(bytes, low)));
      _mm512_store_si512(to + (2 * word + 1) * kCacheLine, Widener::FromE4m3(_mm512_shuffle_epi8(bytes, high)));
    });
  }

  // Adds the products of a tile of R rows of x and C groups over up to kDepth inputs from `first` on to their sums, [C][R][16].
  // The first tile makes the weights' bf16 as it goes.
  template <int R, int C>
  static void AddTile(const Rows& x, int64_t tile, const Quantized& w, int64_t first, bool is_first, TileState& state,
                      Ahead& ahead, float* to) {
    const bf16* values = x.values + tile * kRows * x.E;
    int64_t size = w.E / w.S, last = std::min(w.E, first + kDepth);
    __m512 totals[C][R];
#pragma GCC unroll 3
    for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) totals[c][r] = first == 0 ? _mm512_setzero_ps() : _mm512_load_ps(to + (c * R + r) * kCols);
    }
    for (int64_t g = first / size, e = first; e < last; ++g) {
      __m512 sums[C][R];
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sums[c][r] = _mm512_setzero_ps();
      }
      for (int64_t end = std::min(last, (g + 1) * size); e < end; e += kPacked) {
        int64_t byte = (e - first) * kCols * sizeof(bf16);
        if (is_first && e % kCacheLine == 0) {
          for (int c = 0; c < C; ++c) Put(w, state.values[c], e, state.bytes[c] + byte);
        }
        ahead.Fetch();
#pragma GCC unroll 16
        for (int64_t i = 0; i < kPacked; i += 2) {
          __m512bh weights[C];
#pragma GCC unroll 3
          for (int c = 0; c < C; ++c) weights[c] = LoadBf16(state.bytes[c] + byte + i * kCols * sizeof(bf16));
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            __m512bh two = (__m512bh)FourBytes(values + r * x.E + e + i);
#pragma GCC unroll 3
            for (int c = 0; c < C; ++c) sums[c][r] = _mm512_dpbf16_ps(sums[c][r], weights[c], two);
          }
        }
      }
#pragma GCC unroll 3
      for (int c = 0; c < C; ++c) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          if constexpr (kind == Scales::kRow) {  // whose scale comes at the end
            totals[c][r] = _mm512_add_ps(totals[c][r], sums[c][r]);
          } else {
            totals[c][r] = _mm512_fmadd_ps(sums[c][r], _mm512_loadu_ps(state.scales[c] + g * kCols), totals[c][r]);
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
}  // namespace

void MultiplyE4m3(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  Rows rows{x, T, w.E};
  if (w.Kind() == Scales::kRow) return MultiplyTransposed<E4m3Kernel<Scales::kRow>>(pool, rows, w, y);
  MultiplyTransposed<E4m3Kernel<Scales::kGroups>>(pool, rows, w, y);
}

}  // namespace jpaged::avx512
