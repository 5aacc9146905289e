// Products with AMX tiles: what is multiplied, and what becomes of the sums; see bf16_products.h.
#include "../bf16_weights.h"
#include "../experts.h"
#include "../mlp.h"
#include "bf16_products.h"
#include "level.h"

namespace jpaged::amx {
namespace {

// The rows y(t) of a product with w [N, E].
template <typename Y>
class Linear {
  using Out = std::remove_pointer_t<std::invoke_result_t<Y, int64_t>>;

 public:
  static constexpr int64_t kPieces = sizeof(Out) / 2;

  Linear(const bf16* w, int64_t T, int64_t N, int64_t E, const Y& y) : w_(w), T_(T), N_(N), E_(E), y_(y) {}

  void Rows(int64_t group, const bf16* (&w)[2]) {
    const bf16* from = w_ + group * kGroup * E_;
    if (group * kGroup < N_ && (group + 1) * kGroup > N_) {  // a tile reads all of its rows
      static thread_local Memory memory;
      bf16* padded = Scratch<bf16>(memory, kGroup * E_);
      int64_t count = (N_ - group * kGroup) * E_;
      std::copy_n(from, count, padded), std::fill_n(padded + count, kGroup * E_ - count, 0);
      from = padded;
    }
    w[0] = from, w[1] = from + kSide * E_;
  }

  void Fetch(int64_t group, int64_t t) const {
    const Out* to = y_(std::min(t, T_ - 1)) + group * kGroup;
    for (int64_t i = 0; i < kGroup; i += kCacheLine / sizeof(Out)) PrefetchL2(to + i);
  }

  void Write(int64_t group, int64_t tile, int64_t piece, const Sums& sums) const {
    int64_t column = group * kGroup + piece * kSide;
    __m512i words[kSide];
    if constexpr (kPieces == 1) {
      PairsOfRows(sums, words);
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kSide; ++i) words[i] = _mm512_load_si512(sums[piece][i]);
    }
    int64_t rows = std::min(kSide, T_ - tile * kSide);
    auto put = [&](int64_t i, __m512i row) {
      if (i < rows) Put(y_(tile * kSide + i) + column, row, N_ - column);
    };
    avx512::Transpose(words, put);
  }

 private:
  // Rounds sums to pairs of neighbours.
  static void PairsOfRows(const Sums& sums, __m512i (&words)[kSide]) {
    const __m512i zipped = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                            19, 3, 18, 2, 17, 1, 16, 0);
#pragma GCC unroll 16
    for (int i = 0; i < kSide; ++i) {
      const float(&pair)[kSide][kSide] = sums[i / 8];
      __m512 low = _mm512_load_ps(pair[i % 8 * 2]), high = _mm512_load_ps(pair[i % 8 * 2 + 1]);
      words[i] = _mm512_permutexvar_epi16(zipped, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }

  static void Put(float* to, __m512i row, int64_t count) {
    if (count >= kSide) {
      _mm512_storeu_si512(to, row);
    } else if (count > 0) {
      _mm512_mask_storeu_epi32(to, (1u << count) - 1, row);
    }
  }
  static void Put(bf16* to, __m512i row, int64_t count) {
    if (count >= kGroup) {
      _mm512_storeu_si512(to, row);
    } else {
      _mm512_mask_storeu_epi16(to, (1u << count) - 1, row);
    }
  }

  const bf16* w_;
  int64_t T_, N_, E_;
  const Y& y_;
};

// x packed, in memory of this thread until it packs another.
const bf16* Pack(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E) {
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, Packed(T, E));
  ParallelFor(pool, TilesOf(T), [&](int64_t i) { PackRows([&](int64_t t) { return x + t * E; }, T, E, i, packed); });
  return packed;
}

// y of packed rows.
template <typename Out>
void MultiplyPacked(ffi::ThreadPool& pool, const bf16* packed, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  auto to = [&](int64_t t) { return y + t * N; };
  ForBlocks(pool, T, E, (N + kGroup - 1) / kGroup, [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
    Linear result(w, T, N, E, to);
    MultiplyBlock(packed, first, last, E, begin, end, result);
  });
}

template <typename Out>
void MultiplyTo(ffi::ThreadPool& pool, const bf16* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  if (T > 0) MultiplyPacked(pool, Pack(pool, x, T, E), w, y, T, N, E);
}

// Rows of x for weights of which a few rows at a time become bf16; see bf16_weights.h.
class Operand {
 public:
  static constexpr int64_t kAtOnce = kGroup;

  Operand(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E) : x_(Pack(pool, x, T, E)), T_(T), E_(E) {}

  void Multiply(const bf16* w, int64_t count, float* y, int64_t stride) const {
    Tiles tiles_of_this_thread;
    auto to = [&](int64_t t) { return y + t * stride; };
    Linear result(w, T_, count, E_, to);
    MultiplyBlock(x_, 0, TilesOf(T_), E_, 0, 1, result);
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
