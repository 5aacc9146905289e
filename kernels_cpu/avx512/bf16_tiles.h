// The products of attention in bf16, by vdpbf16ps; see attend.h. Prefill packs the values of each tile into the form that the
// instruction takes, since many queries share it; decode uses them as they lie. Both sum in one order.
#pragma once

#include "../attend.h"
#include "lanes.h"

namespace jpaged::avx512 {

// Many queries of a row and one KV head.
class PackedTiles {
 public:
  using Lanes = avx512::Lanes;
  using Slot = bf16;
  using Weight = bf16;
  static constexpr int64_t kSlots = kTile;
  static constexpr bool kFetches = false;

  PackedTiles(const Problem& p, const Item& item) : D_(p.D), V_(p.V), value_(p.ValueAt()), rows_(item.count * p.G) {
    static thread_local Memory q, v;
    q_ = Scratch<bf16>(q, (rows_ + 3) / 4 * 4 * D_), v_ = Scratch<bf16>(v, kTile * V_);
  }

  int64_t Together() const { return 1; }

  void SetQuery(int64_t row, const bf16* q) { std::memcpy(q_ + row * D_, q, D_ * sizeof(bf16)); }

  void Enter(const Tile<bf16>& tile) {  // v [32][V][2 slots]
    auto wide = [this](const bf16* key, int64_t d) {
      return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(key + value_ + d)));
    };
    for (int64_t i = 0; i < kTile; i += 2) {
      for (int64_t d = 0; d < V_; d += 16) {
        __m512i pair = _mm512_or_si512(wide(tile.keys[i], d), _mm512_slli_epi32(wide(tile.keys[i + 1], d), 16));
        _mm512_storeu_si512(v_ + i * V_ + 2 * d, pair);
      }
    }
  }

  void Score(const Tile<bf16>& tile, int64_t, float* scores) {
    for (int64_t slot = 0; slot < kTile; slot += 4) {
      for (int64_t r = 0; r < rows_; r += 4) ScoreFour(q_ + r * D_, tile.keys + slot, D_, scores + r * kTile + slot);
    }
  }

  void Weigh(const Tile<bf16>&, int64_t, const bf16* weights, const float* alpha, float* o) {
    int64_t d = 0;
    for (; d + 64 <= V_; d += 64) WeighAll<4>(weights, d, alpha, o);
    if (d < V_) WeighAll<2>(weights, d, alpha, o);
  }

  void Write(const float* o, float total, bf16* to) {
    __m512 sum = _mm512_set1_ps(total);
    for (int64_t d = 0; d < V_; d += 16) PutRounded(to + d, _mm512_div_ps(_mm512_loadu_ps(o + d), sum));
  }

 private:
  static constexpr int64_t kRows = 6;  // query rows of a register tile of weights

  // scores[r][c] = q[r] . k[c] of 4 queries and 4 slots. Lanes hold dimensions, which are added up at the end: in the order of
  // SlotTiles, so that a query has the same scores in decode and in prefill.
  static void ScoreFour(const bf16* q, const bf16* const* keys, int64_t D, float* scores) {
    __m512 acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
    for (int64_t d = 0; d < D; d += 32) {
      __m512bh x[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) x[r] = LoadBf16(q + r * D + d);
#pragma GCC unroll 16
      for (int c = 0; c < 4; ++c) {
        __m512bh key = LoadBf16(keys[c] + d);
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) acc[r * 4 + c] = _mm512_dpbf16_ps(acc[r * 4 + c], x[r], key);
      }
    }
    float sums[16];
    _mm512_storeu_ps(sums, Sums(acc));
    for (int r = 0; r < 4; ++r) std::memcpy(scores + r * kTile, sums + r * 4, 4 * sizeof(float));
  }

  template <int C>
  void WeighAll(const bf16* weights, int64_t d, const float* alpha, float* o) {
    static constexpr decltype(&WeighRows<1, C>) kBySize[] = {&WeighRows<1, C>, &WeighRows<2, C>, &WeighRows<3, C>,
                                                             &WeighRows<4, C>, &WeighRows<5, C>, &WeighRows<6, C>};
    for (int64_t r = 0; r < rows_; r += kRows) {
      kBySize[std::min(kRows, rows_ - r) - 1](weights + r * kTile, v_ + 2 * d, V_, o + r * V_ + d, alpha + r);
    }
  }

  // o[R][16 C] = alpha * o + weights . v: row i of v holds, for 16 C dimensions, the values of two slots in pairs. V: the
  // width of a value.
  template <int R, int C>
  static void WeighRows(const bf16* weights, const bf16* v, int64_t V, float* o, const float* alpha) {
    __m512 acc[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) {
        acc[r][i] = _mm512_mul_ps(_mm512_loadu_ps(o + r * V + 16 * i), _mm512_set1_ps(alpha[r]));
      }
    }
    for (int64_t slot = 0; slot < kTile; slot += 2, v += 2 * V) {
      __m512bh columns[C];
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) columns[i] = LoadBf16(v + 32 * i);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        __m512bh w = PairOfBf16(weights + r * kTile + slot);
#pragma GCC unroll 4
        for (int i = 0; i < C; ++i) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], w, columns[i]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) _mm512_storeu_ps(o + r * V + 16 * i, acc[r][i]);
    }
  }

  int64_t D_, V_, value_, rows_;
  bf16 *q_, *v_;
};

// One query of a row, for some of its KV heads: keys and values are used as they lie, slot by slot for all heads, so that
// memory is read in order.
class SlotTiles {
 public:
  using Lanes = avx512::Lanes;
  using Slot = bf16;
  using Weight = bf16;
  static constexpr int64_t kSlots = 16;
  static constexpr bool kFetches = true;

  SlotTiles(const Problem& p, const Item& item)
      : q_(p.q + (item.token * p.H + item.head * p.G) * p.D),
        heads_(item.heads),
        G_(p.G),
        D_(p.D),
        V_(p.V),
        width_(p.Width()),
        apart_(p.Apart()),
        value_(p.ValueAt()) {}

  int64_t Together() const { return heads_; }

  void SetQuery(int64_t, const bf16*) {}  // the item's query rows lie together, from q_ on

  void Enter(const Tile<bf16>& tile) {
    int64_t lines = heads_ * width_ / 32;
    ahead_ = {tile.next, lines, kTile * lines / (2 * heads_ * G_ * tile.slots / 16) + 1};
  }

  void Score(const Tile<bf16>& tile, int64_t, float* scores) {
    for (int64_t g = 0; g < G_; g += kMostHeads) {
      auto score = kScore[std::min(kMostHeads, G_ - g) - 1];
      score(q_ + g * D_, G_, tile.keys, tile.slots, heads_, D_, apart_, scores + g * kTile, ahead_);
    }
  }

  void Weigh(const Tile<bf16>& tile, int64_t, const bf16* weights, const float* alpha, float* o) {
    int64_t rows = heads_ * G_;
    for (int64_t r = 0, n; r < rows; r += n, ahead_.Fetch(n * tile.slots / 16)) {
      n = std::min<int64_t>(4, G_ - r % G_);
      for (int64_t d = 0; d < V_;) {
        // As many dimensions at a time as there are registers for.
        int64_t size = n <= 2 && d + 128 <= V_ ? 128 : d + 64 <= V_ ? 64 : 32;
        auto weigh = size == 128  ? (n == 2 ? &WeighRows<2, 4> : &WeighRows<1, 4>)
                     : size == 64 ? (n == 4   ? &WeighRows<4, 2>
                                     : n == 3 ? &WeighRows<3, 2>
                                     : n == 2 ? &WeighRows<2, 2>
                                              : &WeighRows<1, 2>)
                                  : (n == 4   ? &WeighRows<4, 1>
                                     : n == 3 ? &WeighRows<3, 1>
                                     : n == 2 ? &WeighRows<2, 1>
                                              : &WeighRows<1, 1>);
        int64_t offset = r / G_ * apart_ + value_ + d;
        weigh(weights + r * kTile, tile.keys, offset, tile.slots, o + r * V_ + d, V_, alpha + r);
        d += size;
      }
    }
  }

  // Within each 32 dimensions of o, those that unpacking puts first stand first: see WeighRows.
  void Write(const float* o, float total, bf16* to) {
    __m512 sum = _mm512_set1_ps(total);
    for (int64_t d = 0; d < V_; d += 32) {
      PutUnpacked(to + d, _mm512_div_ps(_mm512_loadu_ps(o + d), sum), _mm512_div_ps(_mm512_loadu_ps(o + d + 16), sum));
    }
  }

 private:
  // Brings the next tile's slots, of `lines` cache lines each, into the L2 cache while this tile is at work: the processor does
  // not foresee slots that are far apart, and asked for all at once they would be waited for.
  struct Ahead {
    const bf16* const* slots = nullptr;
    int64_t lines = 0, share = 0;  // share: lines for each 16 scores or so
    int64_t slot = 0, line = 0;

    void Fetch(int64_t shares) {
      for (int64_t n = shares * share; n > 0 && slot < kTile; --n) {
        PrefetchL2((const char*)slots[slot] + kCacheLine * line);
        if (++line == lines) line = 0, ++slot;
      }
    }
  };

  // Scores of a tile's slots for G query heads of each KV head, slot by slot; keys of a slot lie `apart` apart, queries of
  // KV heads `stride` D. Summed as in PackedTiles.
  template <int G>
  static void ScoreHeads(const bf16* q, int64_t stride, const bf16* const* keys, int64_t slots, int64_t heads, int64_t D,
                         int64_t apart, float* scores, Ahead& ahead) {
    constexpr int kPairs = 16 / G;  // of a slot and a KV head
    int64_t slot = 0, head = 0;
    for (int64_t pair = 0; pair < slots * heads; pair += kPairs, ahead.Fetch(1)) {
      __m512 acc[16];
      float* to[kPairs];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
#pragma GCC unroll 16
      for (int i = 0; i < kPairs; ++i) {
        const bf16 *key = keys[slot] + head * apart, *query = q + head * stride * D;
        to[i] = scores + head * stride * kTile + slot;
        for (int64_t d = 0; d < D; d += 32) {
          __m512bh x = LoadBf16(key + d);
#pragma GCC unroll 8
          for (int g = 0; g < G; ++g) acc[i * G + g] = _mm512_dpbf16_ps(acc[i * G + g], LoadBf16(query + g * D + d), x);
        }
        // Past the end, the last slot's first heads again.
        if (++head == heads) head = 0, slot = std::min(slot + 1, slots - 1);
      }
      float sums[16];
      _mm512_storeu_ps(sums, Sums(acc));
      for (int i = 0; i < kPairs; ++i) {
        for (int g = 0; g < G; ++g) to[i][g * kTile] = sums[i * G + g];
      }
    }
  }

  // o[R][32 C] = alpha * o + weights . v over a tile's slots, two of which are unpacked into pairs at a time. V: the width of
  // a value.
  template <int R, int C>
  static void WeighRows(const bf16* weights, const bf16* const* keys, int64_t offset, int64_t slots, float* o, int64_t V,
                        const float* alpha) {
    __m512 acc[R][2 * C];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * C; ++v) {
        acc[r][v] = _mm512_mul_ps(_mm512_loadu_ps(o + r * V + 16 * v), _mm512_set1_ps(alpha[r]));
      }
    }
    for (int64_t i = 0; i < slots; i += 2) {
      __m512bh w[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) w[r] = PairOfBf16(weights + r * kTile + i);
#pragma GCC unroll 4
      for (int v = 0; v < C; ++v) {
        __m512i x = _mm512_loadu_si512(keys[i] + offset + 32 * v), y = _mm512_loadu_si512(keys[i + 1] + offset + 32 * v);
        __m512bh low = (__m512bh)_mm512_unpacklo_epi16(x, y), high = (__m512bh)_mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          acc[r][2 * v] = _mm512_dpbf16_ps(acc[r][2 * v], w[r], low);
          acc[r][2 * v + 1] = _mm512_dpbf16_ps(acc[r][2 * v + 1], w[r], high);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * C; ++v) _mm512_storeu_ps(o + r * V + 16 * v, acc[r][v]);
    }
  }

  static constexpr int64_t kMostHeads = 8;  // query heads of a KV head that are scored together
  static constexpr decltype(&ScoreHeads<1>) kScore[kMostHeads] = {&ScoreHeads<1>, &ScoreHeads<2>, &ScoreHeads<3>,
                                                                  &ScoreHeads<4>, &ScoreHeads<5>, &ScoreHeads<6>,
                                                                  &ScoreHeads<7>, &ScoreHeads<8>};

  const bf16* q_;
  int64_t heads_, G_, D_, V_, width_, apart_, value_;
  Ahead ahead_;
};

}  // namespace jpaged::avx512
