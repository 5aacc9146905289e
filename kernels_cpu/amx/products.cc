// Products with AMX tiles: what is multiplied, and what becomes of the sums; see bf16_products.h.
#include "bf16_products.h"
#include "level.h"

namespace jpaged::amx {
namespace {

// The rows y(t) of a product with w [N, E].
template <typename Y>
class Linear {
  using Out = std::remove_pointer_t<std::invoke_result_t<Y, int64_t>>;

 public:
  static constexpr int64_t kWidth = kCacheLine / sizeof(Out), kPieces = 4;

  Linear(const bf16* w, int64_t T, int64_t N, int64_t E, const Y& y, bool past_cache)
      : w_(w), T_(T), N_(N), E_(E), y_(y), past_cache_(past_cache) {}

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

  void Write(int64_t group, int64_t tile, int64_t piece, const Sums& sums) const {
    int64_t first = tile * kSide + piece * kQuarter, rows = T_ - first;
    if (rows <= 0) return;
    auto from = [&](int64_t half) {
      return [&, half](int64_t n) { return &sums[half][n][piece * kQuarter]; };
    };
    auto put = [&](int64_t t, int64_t column, __m512i row) {
      if (t < rows) Put(y_(first + t) + column, row, N_ - column);
    };
    for (int64_t half = 0; half < 2; ++half) {
      int64_t column = group * kGroup + half * kWidth;
      if constexpr (kWidth == kSide) {
        avx512::TransposeQuarter(from(half), [&](int64_t t, __m512i row) { put(t, column, row); });
      } else if (half == 0) {
        __m512i low[4], high[4], x[4];
        avx512::LoadLanes(from(0), low), avx512::LoadLanes(from(1), high);
        // Lane l of x[i] has four sums of row 8 l + i of the group, then of row 8 l + 4 + i.
        for (int i = 0; i < 4; ++i) x[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_castsi512_ps(high[i]), _mm512_castsi512_ps(low[i]));
        __m512i a = _mm512_unpacklo_epi16(x[0], x[1]), b = _mm512_unpackhi_epi16(x[0], x[1]);
        __m512i c = _mm512_unpacklo_epi16(x[2], x[3]), d = _mm512_unpackhi_epi16(x[2], x[3]);
        __m512i e = _mm512_unpacklo_epi32(a, c), f = _mm512_unpacklo_epi32(b, d);
        __m512i g = _mm512_unpackhi_epi32(a, c), h = _mm512_unpackhi_epi32(b, d);
        put(0, column, _mm512_unpacklo_epi64(e, f)), put(1, column, _mm512_unpackhi_epi64(e, f));
        put(2, column, _mm512_unpacklo_epi64(g, h)), put(3, column, _mm512_unpackhi_epi64(g, h));
      }
    }
  }

 private:
  void Put(Out* to, __m512i row, int64_t count) const {
    if (count >= kWidth) {
      PutLine(to, row, past_cache_);
    } else if constexpr (kWidth == kGroup) {
      _mm512_mask_storeu_epi16(to, (1u << count) - 1, row);
    } else if (count > 0) {
      _mm512_mask_storeu_epi32(to, (1u << count) - 1, row);
    }
  }

  const bf16* w_;
  int64_t T_, N_, E_;
  const Y& y_;
  bool past_cache_;
};

// h = gated(gate . x, up . x), rounded to bf16 and packed as rows of x are; w is [2, F, E].
template <Activation kind>
class GatedRows {
 public:
  static constexpr int64_t kPieces = kSide / 2;

  GatedRows(const bf16* w, bf16* h, int64_t T, int64_t F, int64_t E)
      : w_(w), h_(h), F_(F), E_(E), past_cache_(GoesPastCache(h, kCacheLine, Packed(T, F) * sizeof(bf16))) {}

  void Rows(int64_t group, const bf16* (&w)[2]) const {
    w[0] = w_ + group * kSide * E_, w[1] = w[0] + F_ * E_;
  }

  void Write(int64_t group, int64_t tile, int64_t piece, const Sums& sums) const {
    __m512i pairs = GatedPairs<kind>(sums, piece, [](int64_t, int64_t, float sum) { return sum; });
    PutLine(h_ + tile * kSide * F_ + (group * kPieces + piece) * 2 * kSide, pairs, past_cache_);
  }

 private:
  const bf16* w_;
  bf16* h_;
  int64_t F_, E_;
  bool past_cache_;
};

// y of packed rows.
template <typename Out>
void MultiplyPacked(ffi::ThreadPool& pool, const bf16* packed, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  auto to = [&](int64_t t) { return y + t * N; };
  bool past_cache = GoesPastCache(y, N * sizeof(Out), T * N * sizeof(Out));
  ForBlocks(pool, kBlocking, T, E, (N + kGroup - 1) / kGroup, [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
    Linear result(w, T, N, E, to, past_cache);
    MultiplyBlock(packed, first, last, E, begin, end, result);
  });
}

template <typename Out>
void MultiplyTo(ffi::ThreadPool& pool, const bf16* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  if (T > 0) MultiplyPacked(pool, Pack(pool, x, T, E), w, y, T, N, E);
}

template <Activation kind>
const bf16* MultiplyGated(ffi::ThreadPool& pool, const bf16* packed, const bf16* w, int64_t T, int64_t F, int64_t E) {
  static thread_local Memory memory;
  bf16* h = Scratch<bf16>(memory, Packed(T, F));
  ForBlocks(pool, kBlocking, T, E, F / kSide, [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
    GatedRows<kind> result(w, h, T, F, E);
    MultiplyBlock(packed, first, last, E, begin, end, result);
  });
  return h;
}

template <typename Out>
void MlpTo(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, Out* y, int64_t T, int64_t N,
           int64_t E, int64_t F) {
  auto gate = kind == Activation::kSilu ? &MultiplyGated<Activation::kSilu> : &MultiplyGated<Activation::kGeluTanh>;
  MultiplyPacked(pool, gate(pool, Pack(pool, x, T, E), gate_up, T, F, E), down, y, T, N, F);
}
}  // namespace

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E) {
  MultiplyTo(pool, x, w, y, T, N, E);
}

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E) {
  MultiplyTo(pool, x, w, y, T, N, E);
}

void Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, float* y, int64_t T, int64_t N,
         int64_t E, int64_t F) {
  MlpTo(pool, kind, x, gate_up, down, y, T, N, E, F);
}

void Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, bf16* y, int64_t T, int64_t N,
         int64_t E, int64_t F) {
  MlpTo(pool, kind, x, gate_up, down, y, T, N, E, F);
}

// The unit of work is a strip of one expert's weight, for all of its tokens.
void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E) {
  constexpr int64_t kStripBytes = 256 * 1024;
  std::vector<int64_t> tiles(1);  // of x, before those of each expert
  for (const Expert& expert : experts) tiles.push_back(tiles.back() + TilesOf(expert.count));
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, tiles.back() * kSide * E);
  ParallelFor(pool, experts.size(), [&](int64_t i) {
    auto from = [&](int64_t t) { return pairs.x[experts[i].first + t]; };
    for (int64_t tile = 0; tile < tiles[i + 1] - tiles[i]; ++tile) {
      PackRows(from, experts[i].count, E, tile, packed + tiles[i] * kSide * E);
    }
  });
  int64_t groups = (N + kGroup - 1) / kGroup, of_strip = std::max<int64_t>(1, kStripBytes / (2 * kGroup * E));
  int64_t strips = (groups + of_strip - 1) / of_strip;
  ParallelFor(pool, experts.size() * strips, [&](int64_t item) {
    Tiles tiles_of_this_thread;
    int64_t i = item / strips, strip = item % strips, T = experts[i].count;
    auto to = [&](int64_t t) { return pairs.y[experts[i].first + t]; };
    Linear result(experts[i].w, T, N, E, to, false);
    for (int64_t block = 0; block < kBlocking.Count(T, E); ++block) {
      int64_t first = kBlocking.First(block, T, E), last = kBlocking.First(block + 1, T, E);
      MultiplyBlock(packed + tiles[i] * kSide * E, first, last, E, groups * strip / strips, groups * (strip + 1) / strips, result);
    }
  });
}

}  // namespace jpaged::amx
