// Paged attention with AVX-512 bf16; see paged_attention.h. A prefill packs the values of each tile into the form that
// vdpbf16ps multiplies, since many queries share it; decode uses them as they lie. Both sum in one order: the same query
// over the same context has the same bits in both.
#include "../paged_attention.h"

#include <cmath>
#include <cstring>

#include "lanes.h"

namespace jpaged {
namespace {

constexpr int64_t kRows = 6;  // query rows of a register tile of weights

// One thread's memory: an item's queries and accumulators, a tile's values, and a slot's keys and values of all heads as
// zeros. Queries and scores have room for whole tiles of four.
struct Scratch {
  bf16 *q, *v, *p, *zeros;
  float *scores, *alpha, *o, *top, *total;

  void Size(int64_t rows, int64_t D) {
    int64_t tiles = (rows + 3) / 4 * 4;
    q = Room<bf16>(memory[0], tiles * D), v = Room<bf16>(memory[1], kTile * D), p = Room<bf16>(memory[2], rows * kTile);
    zeros = Room<bf16>(memory[3], 2 * rows * D), scores = Room<float>(memory[4], tiles * kTile);
    alpha = Room<float>(memory[5], rows), top = Room<float>(memory[6], rows), total = Room<float>(memory[7], rows);
    o = Room<float>(memory[8], rows * D);
    std::fill(zeros, zeros + 2 * rows * D, 0), std::fill(o, o + rows * D, 0.0f);
    std::fill(top, top + rows, kMasked), std::fill(total, total + rows, 0.0f);
  }

 private:
  std::vector<Line> memory[9];
};

// e^x to 2 units in the last place; 0 below -87, NaN of NaN.
inline __m512 Exp(__m512 x) {
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  }
  y = _mm512_fmadd_ps(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ), y, n);
}

// scores[r][c] = q[r] . k[c] of R queries and C slots. Lanes hold dimensions, which are added up at the end: in one order
// for any R and C, so that a query has the same scores in decode and in prefill.
template <int R, int C>
inline void Score(const bf16* q, const bf16* const* at, int64_t offset, int64_t D, float* scores) {
  static_assert(R * C == 16);
  __m512 acc[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
  for (int64_t d = 0; d < D; d += 32) {
    __m512bh x[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = Load(q + r * D + d);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      __m512bh key = Load(at[c] + offset + d);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) acc[r * C + c] = _mm512_dpbf16_ps(acc[r * C + c], x[r], key);
    }
  }
  float sums[16];
  _mm512_storeu_ps(sums, Sums(acc));
  for (int r = 0; r < R; ++r) std::memcpy(scores + r * kTile, sums + r * C, C * sizeof(float));
}

// Brings a tile's slots, of `lines` cache lines each, into the L2 cache while the tile before it is at work: the processor
// does not foresee slots that are far apart, and asked for all at once they would be waited for.
struct Ahead {
  const bf16* const* at;
  int64_t lines, share;  // share: lines for each 16 scores or so
  int64_t slot = 0, line = 0;

  void Bring(int64_t shares) {
    for (int64_t n = shares * share; n > 0 && slot < kTile; --n) {
      _mm_prefetch((const char*)at[slot] + 64 * line, _MM_HINT_T1);
      if (++line == lines) line = 0, ++slot;
    }
  }
};

// Scores of a tile's slots for G query heads of each KV head, slot by slot, so that memory is read in order; keys of a slot
// lie 2 D apart, those of query heads of KV heads `stride` D. Summed as Score does.
template <int G>
void ScoreSlots(const bf16* q, int64_t stride, const bf16* const* at, int64_t slots, int64_t heads, int64_t D, float* scores,
                Ahead& ahead) {
  constexpr int kPairs = 16 / G;  // of a slot and a KV head
  int64_t slot = 0, head = 0;
  for (int64_t pair = 0; pair < slots * heads; pair += kPairs, ahead.Bring(1)) {
    __m512 acc[16];
    float* to[kPairs];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int i = 0; i < kPairs; ++i) {
      const bf16 *key = at[slot] + 2 * head * D, *query = q + head * stride * D;
      to[i] = scores + head * stride * kTile + slot;
      for (int64_t d = 0; d < D; d += 32) {
        __m512bh x = Load(key + d);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) acc[i * G + g] = _mm512_dpbf16_ps(acc[i * G + g], Load(query + g * D + d), x);
      }
      if (++head == heads) head = 0, slot = std::min(slot + 1, slots - 1);  // past the end, the last one's first ones again
    }
    float sums[16];
    _mm512_storeu_ps(sums, Sums(acc));
    for (int i = 0; i < kPairs; ++i) {
      for (int g = 0; g < G; ++g) to[i][g * kTile] = sums[i * G + g];
    }
  }
}

// o[R][16 V] = alpha * o + weights . v: row i of v holds, for 16 V dimensions, the values of two slots in pairs.
template <int R, int V>
inline void WeighPacked(const bf16* weights, const bf16* v, int64_t D, float* o, const float* alpha) {
  __m512 acc[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
      acc[r][i] = _mm512_mul_ps(_mm512_loadu_ps(o + r * D + 16 * i), _mm512_set1_ps(alpha[r]));
    }
  }
  for (int64_t slot = 0; slot < kTile; slot += 2, v += 2 * D) {
    __m512bh columns[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) columns[i] = Load(v + 32 * i);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, weights + r * kTile + slot, sizeof(pair));
      __m512bh w = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) acc[r][i] = _mm512_dpbf16_ps(acc[r][i], w, columns[i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) _mm512_storeu_ps(o + r * D + 16 * i, acc[r][i]);
  }
}

template <int V>
void WeighPacked(int64_t rows, const bf16* weights, const bf16* v, int64_t D, float* o, const float* alpha) {
  using Function = decltype(&WeighPacked<1, V>);
  static constexpr Function kBySize[] = {&WeighPacked<1, V>, &WeighPacked<2, V>, &WeighPacked<3, V>,
                                         &WeighPacked<4, V>, &WeighPacked<5, V>, &WeighPacked<6, V>};
  for (int64_t r = 0; r < rows; r += kRows) {
    kBySize[std::min(kRows, rows - r) - 1](weights + r * kTile, v, D, o + r * D, alpha + r);
  }
}

// The values of a tile: v [32][D][2 slots].
void PackValues(const bf16* const (&at)[kTile], int64_t D, bf16* v) {
  auto wide = [D](const bf16* row, int64_t d) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(row + D + d)));
  };
  for (int64_t i = 0; i < kTile; i += 2) {
    for (int64_t d = 0; d < D; d += 16) {
      __m512i pair = _mm512_or_si512(wide(at[i], d), _mm512_slli_epi32(wide(at[i + 1], d), 16));
      _mm512_storeu_si512(v + i * D + 2 * d, pair);
    }
  }
}

// Scores of a query row against a tile -> weights in bf16, and the row's running maximum and sum; returns the factor for
// what it has accumulated. The query sees slots [low, high) of the tile.
float Soften(const Problem& p, float* scores, bf16* weights, int64_t low, int64_t high, float* top, float* total) {
  uint64_t upto = high >= kTile ? ~0ull : high <= 0 ? 0 : (1ull << high) - 1;
  uint64_t from = low <= 0 ? ~0ull : low >= kTile ? 0 : ~((1ull << low) - 1);
  uint64_t seen = upto & from;
  if (p.soft_cap > 0) {
    for (int64_t i = 0; i < kTile; ++i) scores[i] = p.soft_cap * std::tanh(scores[i] * p.scale / p.soft_cap) / p.scale;
  }
  __m512 s[4], most = _mm512_set1_ps(kMasked);
  for (int i = 0; i < 4; ++i) {
    __mmask16 mask = seen >> (16 * i);
    s[i] = _mm512_mask_mul_ps(_mm512_set1_ps(kMasked), mask, _mm512_loadu_ps(scores + 16 * i), _mm512_set1_ps(p.scale));
    most = _mm512_max_ps(most, s[i]);
  }
  float before = *top;
  *top = std::max(before, _mm512_reduce_max_ps(most));
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < 4; ++i) {
    __mmask16 mask = seen >> (16 * i);
    __m512 weight = _mm512_maskz_mov_ps(mask, Exp(_mm512_sub_ps(s[i], _mm512_set1_ps(*top))));
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh(weight);
    _mm256_storeu_si256((__m256i*)(weights + 16 * i), rounded);
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16)));
  }
  float alpha = before == *top ? 1.0f : std::exp(before - *top);
  *total = *total * alpha + _mm512_reduce_add_ps(sum);
  return alpha;
}

// Many queries of a row: values are packed, since each serves many.
void AttendMany(const Problem& p, const Item& item, Scratch& scratch) {
  int64_t rows = item.count * p.G, D = p.D;  // query rows: [count, G]
  scratch.Size(rows, D);
  for (int64_t r = 0; r < rows; ++r) Start(p, item.head * p.G + r % p.G, &scratch.top[r], &scratch.total[r]);
  auto query = [&](int64_t token) { return ((item.token + token) * p.H + item.head * p.G) * D; };
  for (int64_t t = 0; t < item.count; ++t) {
    std::memcpy(&scratch.q[t * p.G * D], p.q + query(t), p.G * D * sizeof(bf16));
  }
  for (int64_t first = item.begin / kTile * kTile; first < item.end; first += kTile) {
    const bf16* at[kTile];
    Locate(p, item, item.head, first, scratch.zeros, at);
    PackValues(at, D, scratch.v);
    float *scores = scratch.scores, *alpha = scratch.alpha, *o = scratch.o;
    for (int64_t slot = 0; slot < kTile; slot += 4) {
      for (int64_t r = 0; r < rows; r += 4) Score<4, 4>(&scratch.q[r * D], at + slot, 0, D, scores + r * kTile + slot);
    }
    for (int64_t r = 0; r < rows; ++r) {
      int64_t position = item.position + r / p.G, low = p.window > 0 ? position + 1 - p.window - first : 0;
      alpha[r] = Soften(p, scores + r * kTile, &scratch.p[r * kTile], low, position + 1 - first, &scratch.top[r],
                        &scratch.total[r]);
    }
    int64_t d = 0;
    for (; d + 64 <= D; d += 64) WeighPacked<4>(rows, scratch.p, &scratch.v[2 * d], D, o + d, alpha);
    if (d < D) WeighPacked<2>(rows, scratch.p, &scratch.v[2 * d], D, o + d, alpha);
  }
  for (int64_t r = 0; r < rows; ++r) {
    __m512 total = _mm512_set1_ps(scratch.total[r]);
    for (int64_t d = 0; d < D; d += 16) {
      __m512 mean = _mm512_div_ps(_mm512_loadu_ps(&scratch.o[r * D + d]), total);
      _mm256_storeu_si256((__m256i*)(p.o + query(r / p.G) + r % p.G * D + d), (__m256i)_mm512_cvtneps_pbh(mean));
    }
  }
}

// o[R][32 V] = alpha * o + weights . v over a tile's slots; within each 32 dimensions, those that unpacking puts first
// stand first: see Unpacked.
template <int R, int V>
inline void Weigh(const bf16* weights, const bf16* const* at, int64_t offset, int64_t slots, float* o, int64_t D,
                  const float* alpha) {
  __m512 acc[R][2 * V];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * V; ++v) {
      acc[r][v] = _mm512_mul_ps(_mm512_loadu_ps(o + r * D + 16 * v), _mm512_set1_ps(alpha[r]));
    }
  }
  for (int64_t i = 0; i < slots; i += 2) {
    __m512bh w[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, weights + r * kTile + i, sizeof(pair));
      w[r] = (__m512bh)_mm512_set1_epi32(pair);
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      __m512i x = _mm512_loadu_si512(at[i] + offset + 32 * v), y = _mm512_loadu_si512(at[i + 1] + offset + 32 * v);
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
    for (int v = 0; v < 2 * V; ++v) _mm512_storeu_ps(o + r * D + 16 * v, acc[r][v]);
  }
}

// 32 dimensions in their own order, from what Weigh accumulated; `half` 0 or 1 is the first or last 16 of them.
inline __m512 Unpacked(const float* o, int half) {
  const __m512i order = half == 0 ? _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23)
                                  : _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  return _mm512_permutex2var_ps(_mm512_loadu_ps(o), order, _mm512_loadu_ps(o + 16));
}

constexpr int64_t kMostHeads = 8;  // query heads of a KV head that are scored together
constexpr decltype(&ScoreSlots<1>) kScore[kMostHeads] = {&ScoreSlots<1>, &ScoreSlots<2>, &ScoreSlots<3>, &ScoreSlots<4>,
                                                         &ScoreSlots<5>, &ScoreSlots<6>, &ScoreSlots<7>, &ScoreSlots<8>};

// One query of a row, for some of its KV heads: keys and values are used as they lie, slot by slot for all heads, so that
// memory is read in order. `after`: what this thread does next, or null.
void AttendOne(const Problem& p, const Item& item, const Item* after, Scratch& scratch) {
  int64_t rows = item.heads * p.G, D = p.D;  // query rows: [heads, G], which lie together
  scratch.Size(rows, D);
  for (int64_t r = 0; r < rows; ++r) Start(p, item.head * p.G + r, &scratch.top[r], &scratch.total[r]);
  const bf16 *q = p.q + (item.token * p.H + item.head * p.G) * D, *zeros = scratch.zeros;
  const bf16 *at[kTile], *next[kTile];
  Locate(p, item, item.head, item.begin / kTile * kTile, zeros, at);
  for (int64_t first = item.begin / kTile * kTile; first < item.end; first += kTile) {
    if (first + kTile < item.end) {
      Locate(p, item, item.head, first + kTile, zeros, next);
    } else if (after != nullptr) {
      Locate(p, *after, after->head, after->begin / kTile * kTile, zeros, next);
    } else {
      std::fill(next, next + kTile, zeros);
    }
    int64_t slots = std::min(kTile, (item.end - first + 15) / 16 * 16);
    int64_t lines = item.heads * D / 16;
    Ahead ahead{next, lines, kTile * lines / (2 * rows * slots / 16) + 1};
    for (int64_t g = 0; g < p.G; g += kMostHeads) {
      auto score = kScore[std::min(kMostHeads, p.G - g) - 1];
      score(q + g * D, p.G, at, slots, item.heads, D, &scratch.scores[g * kTile], ahead);
    }
    int64_t low = p.window > 0 ? item.position + 1 - p.window - first : 0;
    for (int64_t r = 0; r < rows; ++r) {
      scratch.alpha[r] = Soften(p, &scratch.scores[r * kTile], &scratch.p[r * kTile], low, item.position + 1 - first,
                                &scratch.top[r], &scratch.total[r]);
    }
    for (int64_t r = 0, n; r < rows; r += n, ahead.Bring(n * slots / 16)) {
      n = std::min<int64_t>(4, p.G - r % p.G);
      for (int64_t d = 0; d < D;) {
        // Dimensions at a time: as many as there are registers for.
        int64_t size = n <= 2 && d + 128 <= D ? 128 : d + 64 <= D ? 64 : 32;
        auto weigh = size == 128 ? (n == 2 ? &Weigh<2, 4> : &Weigh<1, 4>)
                     : size == 64 ? (n == 4 ? &Weigh<4, 2> : n == 3 ? &Weigh<3, 2> : n == 2 ? &Weigh<2, 2> : &Weigh<1, 2>)
                                  : (n == 4 ? &Weigh<4, 1> : n == 3 ? &Weigh<3, 1> : n == 2 ? &Weigh<2, 1> : &Weigh<1, 1>);
        weigh(&scratch.p[r * kTile], at, (2 * (r / p.G) + 1) * D + d, slots, &scratch.o[r * D + d], D, &scratch.alpha[r]);
        d += size;
      }
    }
    std::memcpy(at, next, sizeof(at));
  }
  bf16* o = p.o + (item.token * p.H + item.head * p.G) * D;
  for (int64_t r = 0; r < rows; ++r) {
    __m512 total = _mm512_set1_ps(scratch.total[r]);
    for (int64_t d = 0; d < D; d += 16) {
      __m512 mean = _mm512_div_ps(Unpacked(&scratch.o[r * D + d / 32 * 32], d / 16 % 2), total);
      _mm256_storeu_si256((__m256i*)(o + r * D + d), (__m256i)_mm512_cvtneps_pbh(mean));
    }
  }
}
}  // namespace

void Attend(const Problem& p, const Item& item, const Item* after) {
  static thread_local Scratch scratch;
  if (p.decode) {
    AttendOne(p, item, after, scratch);
  } else {
    AttendMany(p, item, scratch);
  }
}
}  // namespace jpaged
