// Paged attention over a pool of bf16 with AMX; see paged_attention.h. A span's scores are computed for all of its slots, then
// their weights, then the sum of its values: nothing is rescaled within a span. Prefill and decode are one code.
//
// All is computed transposed: the lanes of a register are a block of 16 query rows. Scores [slots][16 rows] are products of
// keys, as they lie in the pool, and of queries, which are packed once. Sums [V][16 rows] are products of values, which are
// transposed once a span, and of weights. A maximum, a sum and a mask of 16 rows then are one instruction a slot.
#include "../attend.h"
#include "../avx512/lanes.h"
#include "level.h"
#include "tiles.h"

namespace jpaged::amx {
namespace {

using avx512::Transpose;

constexpr int64_t kPair = 2 * kSide;            // query rows, slots or dimensions of two tiles
constexpr int64_t kTileSize = kSide * kDepth;   // bf16 in a tile
constexpr int64_t kFetchedBytes = 512 * 1024;   // what is brought into the L2 cache ahead, at most

static_assert(kPair == kDepth && kSpan % (4 * kSide) == 0);

// The first operand of a product, 16 rows: bytes from one row to the next, and numbers from a tile to the next.
struct Operand {
  const bf16* rows;
  int64_t stride, step;
};

// sums[i][j] = a[i] . b[j], along so many tiles. b is packed. Calls `between` for each.
template <typename Between>
void MultiplyPairs(const Operand& a0, const Operand& a1, const bf16* b0, const bf16* b1, int64_t tiles,
                   float* const (&sums)[2][2], const Between& between) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < tiles; ++i) {
    _tile_loadd(4, a0.rows + i * a0.step, a0.stride);
    _tile_loadd(6, b0 + i * kTileSize, 64);
    _tile_loadd(5, a1.rows + i * a1.step, a1.stride);
    _tile_loadd(7, b1 + i * kTileSize, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
    between();
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  _tile_stored(2, sums[1][0], 64);
  _tile_stored(3, sums[1][1], 64);
}

// sums[i] = a[i] . b
template <typename Between>
void MultiplyColumn(const Operand* a, const bf16* b, int64_t tiles, float* sums, const Between& between) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < tiles; ++i) {
    _tile_loadd(7, b + i * kTileSize, 64);
    _tile_loadd(4, a[0].rows + i * a[0].step, a[0].stride);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, a[1].rows + i * a[1].step, a[1].stride);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, a[2].rows + i * a[2].step, a[2].stride);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(4, a[3].rows + i * a[3].step, a[3].stride);
    _tile_dpbf16ps(3, 4, 7);
    between();
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSide * kSide, 64);
  _tile_stored(2, sums + 2 * kSide * kSide, 64);
  _tile_stored(3, sums + 3 * kSide * kSide, 64);
}

// The same of two.
template <typename Between>
void MultiplyTwo(const Operand& a0, const Operand& a1, const bf16* b, int64_t tiles, float* sums0, float* sums1,
                 const Between& between) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t i = 0; i < tiles; ++i) {
    _tile_loadd(7, b + i * kTileSize, 64);
    _tile_loadd(4, a0.rows + i * a0.step, a0.stride);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, a1.rows + i * a1.step, a1.stride);
    _tile_dpbf16ps(1, 5, 7);
    between();
  }
  _tile_stored(0, sums0, 64);
  _tile_stored(1, sums1, 64);
}

// Returns 2^x to 3e-6 of it, before it is rounded to bf16; NaN of NaN. For x far below 0 it is 0.
inline __m512 PowerOfTwo(__m512 x) {
  __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(0.013534168f);
  for (float c : {0.052011464f, 0.24144275f, 0.69300383f, 1.0000026f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, x);
}

// The slots that come next, from `slot` to `end`, whose lines from `offset` on are brought into the L2 cache, `share` at a time.
struct Ahead {
  const bf16* const* slots;
  int64_t offset, lines, slot, end, share, line = 0;

  void Fetch() { Fetch(share); }
  void FetchRest() { Fetch(lines * kSpan); }

 private:
  void Fetch(int64_t count) {
    for (; count > 0 && slot < end; --count) {
      PrefetchL2(reinterpret_cast<const char*>(slots[slot] + offset) + kCacheLine * line);
      if (++line == lines) line = 0, ++slot;
    }
  }
};

// The query rows of two blocks: which positions a row sees, and which are seen by any of them and by all.
struct BlockPair {
  alignas(64) int32_t low[kPair], high[kPair];
  int64_t begin, end, all_begin, all_end;
};

// What a block of query rows has in a span: the largest score and the sum of the weights.
struct Totals {
  __m512 top, total;
};

// By what the sums of a block until now are multiplied, and those of the span that is added; in rows that saw any of the span.
struct Factors {
  __m512 before, now;
  __mmask16 seen;

  void Add(float* all, __m512 o) const {
    __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(all), before, _mm512_mul_ps(o, now));
    _mm512_mask_store_ps(all, seen, sum);
  }
};

// A thread's work on items, one after the other, in memory that it keeps.
class ItemAttention {
 public:
  void Attend(const Problem& p, const Item& item, const Item* after);

 private:
  void Begin();
  void PackQueries(int64_t head);
  void AttendSpan(int64_t head, int64_t first);
  void PackKeys(int64_t head, int64_t begin, int64_t end);
  void PackValues(int64_t head, int64_t d, int64_t begin, int64_t end);
  Totals Softmax(const BlockPair& rows, int64_t half, int64_t first, int64_t begin, int64_t end, float* scores, bf16* weights);
  Factors AddTotals(int64_t block, Totals span);
  void AddSpans();
  void Write(int64_t head);

  bf16* Place(bf16* heads, int64_t head, int64_t row, int64_t width) const {  // of a query row in q or o
    return heads + ((item_.token + row / p_.G) * p_.H + (item_.head + head) * p_.G + row % p_.G) * width;
  }
  int64_t BlockRows(int64_t block) const { return std::min(kSide, of_head_ - block * kSide); }
  // Where the sums of a block of rows of a span lie: top, total, o, [kSumsBefore + V][rows].
  float* SpanSums(int64_t span, int64_t head, int64_t block) const {
    return item_.spans->sums + ((span * item_.heads + head) * of_head_ + block * kSide) * (kSumsBefore + p_.V);
  }

  Problem p_;
  Item item_;
  int64_t of_head_, blocks_;  // query rows of a head, and blocks of them
  const bf16 *slots_[kSpan], *next_[kSpan];
  bool is_even_[kSpan / kSide];      // whether 16 slots lie evenly apart
  Operand key_tiles_[kSpan / kSide];
  Ahead ahead_;
  BlockPair* pairs_;
  bf16 *q_;        // [heads][blocks][D / 2][16 rows][2]
  bf16 *keys_;     // [kSpan / 16][D / 32][16 slots][32], those that are not used as they lie
  bf16 *values_;   // [2][kSpan / 32][16 dimensions][32 slots]
  bf16 *weights_;  // [blocks][kSpan / 2][16 rows][2]
  bf16 *zeros_;
  float *scores_;  // [2][kSpan][16 rows]
  float *tops_, *totals_;  // [heads][blocks][16 rows]
  float *o_;               // [heads][blocks][V][16 rows]
  Factors *factors_;       // [blocks]
  Memory memory_[11];
};

void ItemAttention::Begin() {
  of_head_ = item_.count * p_.G, blocks_ = (of_head_ + kSide - 1) / kSide;
  int64_t pairs = (blocks_ + 1) / 2, all = item_.heads * blocks_, zeros = item_.heads * p_.Width();
  pairs_ = Scratch<BlockPair>(memory_[0], pairs), q_ = Scratch<bf16>(memory_[1], all * kSide * p_.D);
  keys_ = Scratch<bf16>(memory_[2], kSpan * p_.D), values_ = Scratch<bf16>(memory_[3], kSpan * kPair);
  weights_ = Scratch<bf16>(memory_[4], blocks_ * kSpan * kSide), zeros_ = Scratch<bf16>(memory_[5], zeros);
  scores_ = Scratch<float>(memory_[6], kPair * kSpan), factors_ = Scratch<Factors>(memory_[7], blocks_);
  tops_ = Scratch<float>(memory_[8], all * kSide), totals_ = Scratch<float>(memory_[9], all * kSide);
  o_ = Scratch<float>(memory_[10], all * kSide * p_.V);
  std::fill(zeros_, zeros_ + zeros, 0), std::fill(o_, o_ + all * kSide * p_.V, 0.0f);
  std::fill(tops_, tops_ + all * kSide, kMasked), std::fill(totals_, totals_ + all * kSide, 0.0f);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    BlockPair& rows = pairs_[pair];
    rows.begin = rows.all_begin = rows.end = rows.all_end = -1;
    for (int64_t i = 0; i < kPair; ++i) {  // past the end, the last row again
      int64_t token = std::min(pair * kPair + i, of_head_ - 1) / p_.G, position = item_.position + token;
      int64_t low = p_.window > 0 ? std::max<int64_t>(0, position + 1 - p_.window) : 0, high = Past(p_, item_.token + token, position);
      rows.low[i] = low, rows.high[i] = high;
      rows.begin = i == 0 ? low : std::min(rows.begin, low), rows.all_begin = std::max(rows.all_begin, low);
      rows.end = std::max(rows.end, high), rows.all_end = i == 0 ? high : std::min(rows.all_end, high);
    }
  }
  for (int64_t head = 0; head < item_.heads; ++head) {
    PackQueries(head);
    for (int64_t row = 0; p_.sinks != nullptr && row < of_head_; ++row) {  // a score before any other
      int64_t i = head * blocks_ * kSide + row;
      tops_[i] = p_.sinks[(item_.head + head) * p_.G + row % p_.G], totals_[i] = 1.0f;
    }
  }
}

void ItemAttention::PackQueries(int64_t head) {
  for (int64_t block = 0; block < blocks_; ++block) {
    bf16* packed = q_ + (head * blocks_ + block) * kSide * p_.D;
    const bf16* from[kSide];
    int64_t count = BlockRows(block);
    for (int64_t i = 0; i < count; ++i) from[i] = Place(const_cast<bf16*>(p_.q), head, block * kSide + i, p_.D);
    for (int64_t d = 0; d < p_.D; d += kDepth) {
      __m512i rows[kSide];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSide; ++i) rows[i] = i < count ? _mm512_loadu_si512(from[i] + d) : _mm512_setzero_si512();
      Transpose(rows, packed + d * kSide, kDepth);
    }
  }
}

// Copies keys of slots that do not lie evenly apart, and all where several products read them.
void ItemAttention::PackKeys(int64_t head, int64_t begin, int64_t end) {
  int64_t offset = head * p_.Apart();
  for (int64_t tile = begin / kSide; tile < end / kSide; ++tile) {
    const bf16* const* slots = slots_ + tile * kSide;
    if (is_even_[tile] && blocks_ <= 2) {
      key_tiles_[tile] = {slots[0] + offset, p_.Stride() * int64_t{sizeof(bf16)}, kDepth};
      continue;
    }
    bf16* to = keys_ + tile * kSide * p_.D;
    key_tiles_[tile] = {to, kDepth * sizeof(bf16), kTileSize};
    for (int64_t slot = 0; slot < kSide; ++slot, to += kDepth) {
      for (int64_t d = 0; d < p_.D; d += kDepth) {
        _mm512_store_si512(to + d * kSide, _mm512_loadu_si512(slots[slot] + offset + d));
      }
    }
  }
}

// Transposes the dimensions [d, d + 32) of the values of these slots, whole 32.
void ItemAttention::PackValues(int64_t head, int64_t d, int64_t begin, int64_t end) {
  int64_t offset = head * p_.Apart() + p_.ValueAt() + d;
  for (int64_t slot = begin; slot < end; slot += kDepth) {
    __m512i low[kSide], high[kSide];  // of two slots each
#pragma GCC unroll 16
    for (int64_t i = 0; i < kSide; ++i) {
      __m512i x = _mm512_loadu_si512(slots_[slot + 2 * i] + offset), y = _mm512_loadu_si512(slots_[slot + 2 * i + 1] + offset);
      low[i] = _mm512_unpacklo_epi16(x, y), high[i] = _mm512_unpackhi_epi16(x, y);
    }
    // Unpacking takes four of each eight dimensions.
    bf16* to = values_ + slot * kSide;
    auto put = [&](int64_t j, int64_t of, __m512i words) {
      int64_t row = j / 4 * 8 + of + j % 4;
      _mm512_store_si512(to + row / kSide * (kSpan * kSide) + row % kSide * kDepth, words);
    };
    Transpose(low, [&](int64_t j, __m512i words) { put(j, 0, words); });
    Transpose(high, [&](int64_t j, __m512i words) { put(j, 4, words); });
    ahead_.Fetch();
  }
}

// Of scores [kSpan][16 rows] of slots [begin, end) from `first` on, whole 32, makes weights relative to the row's largest score.
Totals ItemAttention::Softmax(const BlockPair& rows, int64_t half, int64_t first, int64_t begin, int64_t end, float* scores,
                              bf16* weights) {
  if (p_.soft_cap > 0) {
    const __m512 cap = _mm512_set1_ps(p_.soft_cap), most = _mm512_set1_ps(20.0f), twice = _mm512_set1_ps(2.0f);
    for (int64_t slot = begin; slot < end; ++slot) {
      __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + slot * kSide), _mm512_set1_ps(p_.scale / p_.soft_cap));
      x = _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), most), _mm512_min_ps(most, x));  // NaN of NaN
      __m512 power = Exp<avx512::Lanes>(_mm512_add_ps(x, x));
      x = _mm512_sub_ps(_mm512_set1_ps(1.0f), _mm512_div_ps(twice, _mm512_add_ps(power, _mm512_set1_ps(1.0f))));
      _mm512_store_ps(scores + slot * kSide, _mm512_mul_ps(cap, x));
    }
  }
  float scale = p_.soft_cap > 0 ? 1.0f : p_.scale;
  // Of [begin, end), those that all rows see are [all_begin, all_end), whole 32.
  int64_t all_begin = std::clamp((rows.all_begin - first + kDepth - 1) / kDepth * kDepth, begin, end);
  int64_t all_end = std::clamp((rows.all_end - first) / kDepth * kDepth, all_begin, end);
  __m512i low = _mm512_sub_epi32(_mm512_load_si512(rows.low + half * kSide), _mm512_set1_epi32(first));
  __m512i high = _mm512_sub_epi32(_mm512_load_si512(rows.high + half * kSide), _mm512_set1_epi32(first));
  auto seen = [&](int64_t slot) {
    __m512i at = _mm512_set1_epi32(slot);
    return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(low, at), high, at);
  };
  auto in_parts = [&](const auto& in_part, const auto& whole) {
    in_part(begin, all_begin), whole(all_begin, all_end), in_part(all_end, end);
  };
  __m512 tops[4];
  for (__m512& top : tops) top = _mm512_set1_ps(kMasked);
  in_parts(
      [&](int64_t slot, int64_t to) {
        for (; slot < to; ++slot) tops[0] = _mm512_mask_max_ps(tops[0], seen(slot), tops[0], _mm512_load_ps(scores + slot * kSide));
      },
      [&](int64_t slot, int64_t to) {
        for (; slot < to; slot += 4) {
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) tops[i] = _mm512_max_ps(tops[i], _mm512_load_ps(scores + (slot + i) * kSide));
        }
      });
  __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
  top = _mm512_mul_ps(top, _mm512_set1_ps(scale));
  const __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008,
                                          0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
  const __m512 log2e = _mm512_set1_ps(1.44269504f), base = _mm512_mul_ps(top, log2e);
  const __m512 factor = _mm512_set1_ps(scale * 1.44269504f);
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  auto weight = [&](int64_t slot) {
    return PowerOfTwo(_mm512_fmsub_ps(_mm512_load_ps(scores + slot * kSide), factor, base));
  };
  auto put = [&](int64_t slot, __m512 x, __m512 y) {
    __m512i pairs = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(y, x));
    _mm512_store_si512(weights + slot * kSide, pairs);
    // The sum is that of rounded weights.
    even = _mm512_add_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
    odd = _mm512_add_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000))));
  };
  in_parts(
      [&](int64_t slot, int64_t to) {
        for (; slot < to; slot += 2) {
          put(slot, _mm512_maskz_mov_ps(seen(slot), weight(slot)), _mm512_maskz_mov_ps(seen(slot + 1), weight(slot + 1)));
        }
      },
      [&](int64_t slot, int64_t to) {
        for (; slot < to; slot += kSide) {
#pragma GCC unroll 8
          for (int i = 0; i < kSide; i += 2) put(slot + i, weight(slot + i), weight(slot + i + 1));
          ahead_.Fetch();
        }
      });
  return {top, _mm512_add_ps(even, odd)};
}

// Adds the totals of a span to those of a block.
Factors ItemAttention::AddTotals(int64_t block, Totals span) {
  float *all_top = tops_ + block * kSide, *all_total = totals_ + block * kSide;
  __m512 top = _mm512_load_ps(all_top), most = _mm512_max_ps(top, span.top);
  Factors factors{Exp<avx512::Lanes>(_mm512_sub_ps(top, most)), Exp<avx512::Lanes>(_mm512_sub_ps(span.top, most)),
                  _mm512_cmp_ps_mask(span.total, _mm512_setzero_ps(), _CMP_NEQ_UQ)};
  _mm512_mask_store_ps(all_top, factors.seen, most);
  factors.Add(all_total, span.total);
  return factors;
}

void ItemAttention::AttendSpan(int64_t head, int64_t first) {
  auto fetch = [&] { ahead_.Fetch(); };
  int64_t begin = std::max(first, item_.begin) - first, end = std::min(first + kSpan, item_.end) - first;
  PackKeys(head, begin / kDepth / 2 * kDepth * 2, (end + 2 * kDepth - 1) / (2 * kDepth) * (2 * kDepth));
  // The slots that any row of a pair sees.
  auto begin_of = [&](const BlockPair& rows) { return std::max(rows.begin - first, begin) / kDepth * kDepth; };
  auto end_of = [&](const BlockPair& rows) { return (std::min(rows.end - first, end) + kDepth - 1) / kDepth * kDepth; };
  auto is_pair = [&](int64_t block) { return block + 1 < blocks_; };
  for (int64_t block = 0; block < blocks_; block += 2) {
    const BlockPair& rows = pairs_[block / 2];
    int64_t from = begin_of(rows), to = end_of(rows);
    if (from >= to) continue;
    const bf16 *q = q_ + (head * blocks_ + block) * kSide * p_.D, *q_high = q + kSide * p_.D;
    float* high = scores_ + kSpan * kSide;
    if (is_pair(block)) {
      for (int64_t slot = from; slot < to; slot += kPair) {
        const Operand* keys = key_tiles_ + slot / kSide;
        float *left = scores_ + slot * kSide, *right = high + slot * kSide;
        MultiplyPairs(keys[0], keys[1], q, q_high, p_.D / kDepth,
                      {{left, right}, {left + kSide * kSide, right + kSide * kSide}}, fetch);
      }
    } else {
      for (int64_t slot = from / (4 * kSide) * (4 * kSide); slot < to; slot += 4 * kSide) {
        MultiplyColumn(key_tiles_ + slot / kSide, q, p_.D / kDepth, scores_ + slot * kSide, fetch);
      }
    }
    for (int64_t half = 0; half < 1 + is_pair(block); ++half) {
      Totals totals = Softmax(rows, half, first, from, to, scores_ + half * kSpan * kSide, weights_ + (block + half) * kSpan * kSide);
      if (item_.spans != nullptr) {
        int64_t count = BlockRows(block + half);
        __mmask16 mask = (1u << count) - 1;
        float* sums = SpanSums(item_.span, head, block + half);
        _mm512_mask_storeu_ps(sums, mask, totals.top), _mm512_mask_storeu_ps(sums + count, mask, totals.total);
      } else {
        factors_[block + half] = AddTotals(head * blocks_ + block + half, totals);
      }
    }
  }
  for (int64_t d = 0; d < p_.V; d += kPair) {
    PackValues(head, d, begin / kDepth * kDepth, (end + kDepth - 1) / kDepth * kDepth);
    for (int64_t block = 0; block < blocks_; block += 2) {
      const BlockPair& rows = pairs_[block / 2];
      int64_t from = begin_of(rows), to = end_of(rows);
      if (from >= to) continue;
      Operand low{values_ + from * kSide, kDepth * sizeof(bf16), kTileSize}, high = low;
      high.rows += kSpan * kSide;
      const bf16* weights = weights_ + (block * kSpan + from) * kSide;
      alignas(64) float sums[2][kPair][kSide];
      if (is_pair(block)) {
        MultiplyPairs(low, high, weights, weights + kSpan * kSide, (to - from) / kDepth,
                      {{sums[0][0], sums[1][0]}, {sums[0][kSide], sums[1][kSide]}}, fetch);
      } else {
        MultiplyTwo(low, high, weights, (to - from) / kDepth, sums[0][0], sums[0][kSide], fetch);
      }
      for (int64_t half = 0; half < 1 + is_pair(block); ++half) {
        if (item_.spans != nullptr) {
          int64_t count = BlockRows(block + half);
          __mmask16 mask = (1u << count) - 1;
          float* to = SpanSums(item_.span, head, block + half) + (kSumsBefore + d) * count;
          for (int64_t i = 0; i < kPair; ++i, to += count) _mm512_mask_storeu_ps(to, mask, _mm512_load_ps(sums[half][i]));
        } else {
          float* to = o_ + ((head * blocks_ + block + half) * p_.V + d) * kSide;
          const Factors factors = factors_[block + half];
          for (int64_t i = 0; i < kPair; ++i, to += kSide) factors.Add(to, _mm512_load_ps(sums[half][i]));
        }
      }
    }
  }
}

// Adds up the spans that several threads have computed.
void ItemAttention::AddSpans() {
  for (int64_t span = 0; span < item_.spans->count; ++span) {
    for (int64_t head = 0; head < item_.heads; ++head) {
      for (int64_t block = 0; block < blocks_; ++block) {
        int64_t count = BlockRows(block), index = head * blocks_ + block;
        __mmask16 mask = (1u << count) - 1;
        const float* sums = SpanSums(span, head, block);
        Factors factors = AddTotals(index, {_mm512_maskz_loadu_ps(mask, sums), _mm512_maskz_loadu_ps(mask, sums + count)});
        float* to = o_ + index * p_.V * kSide;
        sums += kSumsBefore * count;
        for (int64_t d = 0; d < p_.V; ++d, to += kSide, sums += count) factors.Add(to, _mm512_maskz_loadu_ps(mask, sums));
      }
    }
  }
}

void ItemAttention::Write(int64_t head) {
  for (int64_t block = 0; block < blocks_; ++block) {
    int64_t index = head * blocks_ + block, count = BlockRows(block);
    __m512 total = _mm512_load_ps(totals_ + index * kSide);
    bf16* to[kSide];
    for (int64_t i = 0; i < count; ++i) to[i] = Place(p_.o, head, block * kSide + i, p_.V);
    for (int64_t d = 0; d < p_.V; d += kSide) {
      const float* o = o_ + (index * p_.V + d) * kSide;
      __m512i rows[kSide];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSide; ++i) rows[i] = _mm512_castps_si512(_mm512_div_ps(_mm512_load_ps(o + i * kSide), total));
      Transpose(rows, [&](int64_t i, __m512i words) {
        if (i < count) avx512::PutRounded(to[i] + d, _mm512_castsi512_ps(words));
      });
    }
  }
}

void ItemAttention::Attend(const Problem& p, const Item& item, const Item* after) {
  p_ = p, item_ = item;
  Begin();
  int64_t slot_bytes = kSpan * p.Width() * sizeof(bf16);  // of a head
  int64_t together = std::clamp<int64_t>(kFetchedBytes / slot_bytes, 1, item.heads);
  int64_t first = item.begin / kSpan * kSpan;
  Locate(p, item, item.head, first, static_cast<const bf16*>(zeros_), slots_);
  for (; first < item.end; first += kSpan) {
    for (int64_t tile = 0; tile < kSpan / kSide; ++tile) {
      const bf16* const* slots = slots_ + tile * kSide;
      is_even_[tile] = true;
      for (int64_t i = 1; i < kSide; ++i) is_even_[tile] = is_even_[tile] && slots[i] == slots[0] + i * p.Stride();
    }
    const Item* next = first + kSpan < item.end ? &item : after;
    int64_t next_first = next == &item ? first + kSpan : after != nullptr ? after->begin / kSpan * kSpan : 0;
    if (next != nullptr) Locate(p, *next, next->head, next_first, static_cast<const bf16*>(zeros_), next_);
    for (int64_t begin = 0; begin < item.heads; begin += together) {
      int64_t end = std::min(begin + together, item.heads);
      const Item* of = end < item.heads ? &item : next;
      int64_t of_first = end < item.heads ? first : next_first;
      int64_t steps = (end - begin) * (blocks_ * (p.D / kDepth * 4 + kSide) + p.V / kPair * (1 + blocks_) * 8);
      ahead_ = {};
      if (of != nullptr) {
        ahead_.slots = of == &item && end < item.heads ? slots_ : next_;
        int64_t from = end < item.heads ? end : 0, heads = std::min(together, of->heads - from);
        ahead_.offset = from * p.Apart(), ahead_.lines = heads * p.Width() * sizeof(bf16) / kCacheLine;
        ahead_.slot = std::max(of_first, of->begin) - of_first, ahead_.end = std::min(of_first + kSpan, of->end) - of_first;
        ahead_.share = ahead_.lines * (ahead_.end - ahead_.slot) / steps + 1;
      }
      for (int64_t head = begin; head < end; ++head) AttendSpan(head, first);
      ahead_.FetchRest();
    }
    std::memcpy(slots_, next_, sizeof(slots_));
  }
  if (item.spans != nullptr) {
    if (item.spans->left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    AddSpans();
  }
  for (int64_t head = 0; head < item.heads; ++head) Write(head);
}

}  // namespace

void Attend(const Problem& p, const Item& item, const Item* after) {
  Tiles tiles_of_this_thread;
  static thread_local ItemAttention attention;
  attention.Attend(p, item, after);
}

}  // namespace jpaged::amx
