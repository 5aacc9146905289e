// Products with AMX tiles; see linear.h and bf16_weights.h. The weight is the first operand, read as it lies, 32 of its rows at
// a time; x, of which tokens are the second operand's columns, is packed once. The sums of an element run along E in one order.
#include "../avx512/lanes.h"
#include "../bf16_weights.h"
#include "level.h"
#include "tiles.h"

namespace jpaged::amx {
namespace {

using avx512::Transpose;

constexpr int64_t kCols = 2 * kSide;  // rows of w at a time

// Tokens [16 i, 16 i + 16) of x as [E/2][16 tokens][2], zeros past the last one.
void PackTokens(const bf16* x, bf16* packed, int64_t T, int64_t E, int64_t i) {
  packed += kSide * E * i;
  for (int64_t e = 0; e < E; e += kDepth) {
    __m512i rows[16];
#pragma GCC unroll 16
    for (int64_t t = 0; t < kSide; ++t) {
      bool is_token = kSide * i + t < T;
      rows[t] = is_token ? _mm512_loadu_si512(x + (kSide * i + t) * E + e) : _mm512_setzero_si512();
    }
    Transpose(rows, packed + e * kSide, kDepth);
  }
}

inline void Put(float* to, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(to, mask, x); }
inline void Put(bf16* to, __m512 x, __mmask16 mask) { _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(x)); }

// A tile of sums, [16 rows of w][16 tokens], to y [tokens, N].
template <typename Out>
inline void Write(const float (&sums)[kSide][kSide], Out* y, int64_t stride, int64_t tokens, int64_t cols) {
  if (cols <= 0) return;
  alignas(64) float transposed[kSide][kSide];
  __m512i rows[16];
#pragma GCC unroll 16
  for (int i = 0; i < kSide; ++i) rows[i] = _mm512_load_si512(sums[i]);
  Transpose(rows, reinterpret_cast<bf16*>(transposed), kDepth);
  __mmask16 mask = cols >= kSide ? 0xffff : (1u << cols) - 1;
  for (int64_t t = 0; t < std::min(tokens, kSide); ++t) Put(y + t * stride, _mm512_load_ps(transposed[t]), mask);
}

// The products of 32 rows of w and all tokens, of which `cols` columns go to y. `next`: rows of w that come after.
template <typename Out>
void MultiplyColumns(const bf16* packed, const bf16* w, const bf16* next, Out* y, int64_t T, int64_t N, int64_t E,
                     int64_t cols) {
  const bf16* w_high = w + kSide * E;
  for (int64_t t = 0; t < T; t += 2 * kSide) {
    const bf16 *x = packed + t * E, *x_high = x + kSide * E;
    bool is_wide = t + kSide < T;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t e = 0; e < E; e += kDepth) {
      _tile_loadd(4, w + e, E * sizeof(bf16));
      _tile_loadd(5, w_high + e, E * sizeof(bf16));
      if (t == 0) {
        for (int64_t i = 0; i < kCols; ++i) PrefetchL2(next + i * E + e);
      }
      _tile_loadd(6, x + e * kSide, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if (is_wide) {
        _tile_loadd(7, x_high + e * kSide, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    alignas(64) float sums[4][kSide][kSide];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    Write(sums[0], y + t * N, N, T - t, cols);
    Write(sums[1], y + t * N + kSide, N, T - t, cols - kSide);
    if (is_wide) {
      _tile_stored(2, sums[2], 64);
      _tile_stored(3, sums[3], 64);
      Write(sums[2], y + (t + kSide) * N, N, T - t - kSide, cols);
      Write(sums[3], y + (t + kSide) * N + kSide, N, T - t - kSide, cols - kSide);
    }
  }
}

// x in tiles, in memory of this thread until it packs another.
const bf16* Pack(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E) {
  int64_t tiles = (T + kSide - 1) / kSide;
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, tiles * kSide * E);
  ParallelFor(pool, tiles, [&](int64_t i) { PackTokens(x, packed, T, E, i); });
  return packed;
}

template <typename Out>
void MultiplyTo(ffi::ThreadPool& pool, const bf16* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  if (T == 0) return;
  int64_t groups = (N + kCols - 1) / kCols, items = SharesOf(pool, groups, 1);
  const bf16* packed = Pack(pool, x, T, E);
  ParallelFor(pool, items, [&](int64_t item) {
    Tiles tiles_of_this_thread;
    for (int64_t n = groups * item / items * kCols; n < std::min(N, groups * (item + 1) / items * kCols); n += kCols) {
      const bf16* rows = w + n * E;
      std::vector<bf16> padded;  // a tile reads all of its rows
      if (n + kCols > N) {
        padded.resize(kCols * E);
        std::memcpy(padded.data(), rows, (N - n) * E * sizeof(bf16));
        rows = padded.data();
      }
      MultiplyColumns(packed, rows, w + (n + kCols) * E, y + n, T, N, E, std::min(kCols, N - n));
    }
  });
}

// Rows of x for weights of which a few rows at a time become bf16; see bf16_weights.h.
class Operand {
 public:
  static constexpr int64_t kAtOnce = kCols;

  Operand(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E) : x_(Pack(pool, x, T, E)), T_(T), E_(E) {}

  void Multiply(const bf16* w, int64_t count, float* y, int64_t stride) const {
    Tiles tiles_of_this_thread;
    MultiplyColumns(x_, w, w, y, T_, stride, E_, count);
  }

 private:
  const bf16* x_;  // packed
  int64_t T_, E_;
};
}  // namespace

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E) {
  MultiplyTo(pool, x, w, y, T, N, E);
}

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E) {
  MultiplyTo(pool, x, w, y, T, N, E);
}

void MultiplyPlain(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  MultiplyWidened<avx512::Widener, Operand>(pool, x, w, y, T);
}

}  // namespace jpaged::amx
