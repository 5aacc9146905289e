// Paged attention over a pool of bf16 with AMX; see paged_attention.h. A span's scores are computed for all of its slots, then
// their weights, then the sum of its values: nothing is rescaled within a span. Prefill and decode are one code.
//
// Query rows are taken in blocks of 16. Scores are computed transposed, [slots][16 rows]: products of keys, as they lie in the
// pool, and of queries, which are packed once an item. A maximum, a sum, an exponential and a mask are then one instruction for
// all rows of a block. Weights are transposed, [16 rows][slots], and multiplied with values, of which two slots are unpacked at
// a time.
#include "../attend.h"
#include "../avx512/lanes.h"
#include "level.h"
#include "tiles.h"

namespace jpaged::amx {
namespace {

using avx512::Transpose;

constexpr int64_t kPair = 2 * kSide;            // query rows, slots or dimensions of two tiles
constexpr int64_t kTileSize = kSide * kDepth;   // bf16 in a tile
constexpr int64_t kAheadBytes = 512 * 1024;     // of slots that are brought into the L2 cache ahead, at most

static_assert(kPair == kDepth && kSpan % (4 * kSide) == 0);

// The operand of a product in tiles, 16 rows each: bytes from one row to the next, and numbers from a tile to the next one of
// the same sum.
struct Operand {
  const bf16* rows;
  int64_t stride, step;
};

inline Operand Packed(const bf16* tiles) { return {tiles, kDepth * sizeof(bf16), kTileSize}; }

// sums[i][j] = a[i] . b[j], each along so many tiles. Calls `between` for each.
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

// sums[i] = a . b[i] for two.
template <typename Between>
void MultiplyRow(const bf16* a, const bf16* b0, const bf16* b1, int64_t tiles, float* const (&sums)[2], const Between& between) {
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t i = 0; i < tiles; ++i) {
    _tile_loadd(4, a + i * kTileSize, 64);
    _tile_loadd(6, b0 + i * kTileSize, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b1 + i * kTileSize, 64);
    _tile_dpbf16ps(1, 4, 7);
    between();
  }
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
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
struct alignas(64) Factors {
  float before[kSide], now[kSide];
  __mmask16 seen;

  // sums = before * sums + now * o of a row: 32 numbers.
  void Add(int64_t row, float* sums, __m512 low, __m512 high) const {
    if ((seen >> row & 1) == 0) return;
    __m512 by = _mm512_set1_ps(before[row]), added_by = _mm512_set1_ps(now[row]);
    _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_load_ps(sums), by, _mm512_mul_ps(low, added_by)));
    sums += kSide;
    _mm512_store_ps(sums, _mm512_fmadd_ps(_mm512_load_ps(sums), by, _mm512_mul_ps(high, added_by)));
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
  float* Sums(int64_t head, int64_t row, int64_t d) const {  // of a query row, dimensions from d on, whole 32
    return o_ + (((head * blocks_ + row / kSide) * p_.V + d) * kSide + row % kSide * kPair);
  }
  int64_t BlockRows(int64_t block) const { return std::min(kSide, of_head_ - block * kSide); }
  // The sums of a query row in a span that is an item: top, total, o.
  float* SpanSums(int64_t span, int64_t head, int64_t row) const {
    return item_.spans->sums + ((span * item_.heads + head) * of_head_ + row) * (kSumsBefore + p_.V);
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
  bf16 *values_;   // [2][kSpan / 32][16 pairs of slots][16 dimensions][2], of 32 dimensions those that unpacking puts first first
  bf16 *weights_;  // [blocks][kSpan / 32][16 rows][32 slots]
  bf16 *zeros_;
  float *scores_;  // [2][kSpan][16 rows]
  float *tops_, *totals_;  // [heads][blocks][16 rows]
  float *o_;               // [heads][blocks][V / 32][16 rows][32], dimensions as in values_
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
    key_tiles_[tile] = Packed(to);
    for (int64_t slot = 0; slot < kSide; ++slot, to += kDepth) {
      for (int64_t d = 0; d < p_.D; d += kDepth) {
        _mm512_store_si512(to + d * kSide, _mm512_loadu_si512(slots[slot] + offset + d));
      }
    }
  }
}

// Unpacks the dimensions [d, d + 32) of the values of these slots, whole 32, two slots at a time.
void ItemAttention::PackValues(int64_t head, int64_t d, int64_t begin, int64_t end) {
  int64_t offset = head * p_.Apart() + p_.ValueAt() + d;
  bf16 *low = values_ + begin * kSide, *high = low + kSpan * kSide;
  for (int64_t slot = begin; slot < end; slot += 8) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < 8; i += 2, low += kDepth, high += kDepth) {
      __m512i x = _mm512_loadu_si512(slots_[slot + i] + offset), y = _mm512_loadu_si512(slots_[slot + i + 1] + offset);
      _mm512_store_si512(low, _mm512_unpacklo_epi16(x, y)), _mm512_store_si512(high, _mm512_unpackhi_epi16(x, y));
    }
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
  auto pair = [&](__m512 x, __m512 y) {
    __m512i rounded = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(y, x));
    // The sum is that of rounded weights.
    even = _mm512_add_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(rounded, 16)));
    odd = _mm512_add_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(0xffff0000))));
    return rounded;
  };
  __m512i pairs[kSide];
  in_parts(
      [&](int64_t slot, int64_t to) {
        for (; slot < to; slot += kDepth) {
#pragma GCC unroll 16
          for (int i = 0; i < kSide; ++i) {
            int64_t at = slot + 2 * i;
            pairs[i] = pair(_mm512_maskz_mov_ps(seen(at), weight(at)), _mm512_maskz_mov_ps(seen(at + 1), weight(at + 1)));
          }
          Transpose(pairs, weights + slot * kSide, kDepth), ahead_.Fetch();
        }
      },
      [&](int64_t slot, int64_t to) {
        for (; slot < to; slot += kDepth) {
#pragma GCC unroll 16
          for (int i = 0; i < kSide; ++i) pairs[i] = pair(weight(slot + 2 * i), weight(slot + 2 * i + 1));
          Transpose(pairs, weights + slot * kSide, kDepth), ahead_.Fetch();
        }
      });
  return {top, _mm512_add_ps(even, odd)};
}

// Adds the totals of a span to those of a block.
Factors ItemAttention::AddTotals(int64_t block, Totals span) {
  float *all_top = tops_ + block * kSide, *all_total = totals_ + block * kSide;
  __m512 top = _mm512_load_ps(all_top), most = _mm512_max_ps(top, span.top);
  __m512 before = Exp<avx512::Lanes>(_mm512_sub_ps(top, most)), now = Exp<avx512::Lanes>(_mm512_sub_ps(span.top, most));
  Factors factors;
  _mm512_store_ps(factors.before, before), _mm512_store_ps(factors.now, now);
  factors.seen = _mm512_cmp_ps_mask(span.total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  __m512 total = _mm512_fmadd_ps(_mm512_load_ps(all_total), before, _mm512_mul_ps(span.total, now));
  _mm512_mask_store_ps(all_top, factors.seen, most), _mm512_mask_store_ps(all_total, factors.seen, total);
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
      if (item_.spans == nullptr) {
        factors_[block + half] = AddTotals(head * blocks_ + block + half, totals);
        continue;
      }
      for (int64_t row = 0; row < BlockRows(block + half); ++row) {
        float* sums = SpanSums(item_.span, head, (block + half) * kSide + row);
        sums[0] = totals.top[row], sums[1] = totals.total[row];
      }
    }
  }
  for (int64_t d = 0; d < p_.V; d += kPair) {
    PackValues(head, d, begin / kDepth * kDepth, (end + kDepth - 1) / kDepth * kDepth);
    for (int64_t block = 0; block < blocks_; block += 2) {
      const BlockPair& rows = pairs_[block / 2];
      int64_t from = begin_of(rows), to = end_of(rows);
      if (from >= to) continue;
      const bf16 *low = values_ + from * kSide, *high = low + kSpan * kSide;
      const bf16* weights = weights_ + (block * kSpan + from) * kSide;
      alignas(64) float sums[2][2][kSide][kSide];  // of blocks, low and high
      if (is_pair(block)) {
        MultiplyPairs(Packed(weights), Packed(weights + kSpan * kSide), low, high, (to - from) / kDepth,
                      {{sums[0][0][0], sums[0][1][0]}, {sums[1][0][0], sums[1][1][0]}}, fetch);
      } else {
        MultiplyRow(weights, low, high, (to - from) / kDepth, {sums[0][0][0], sums[0][1][0]}, fetch);
      }
      for (int64_t half = 0; half < 1 + is_pair(block); ++half) {
        for (int64_t i = 0, row = (block + half) * kSide; i < BlockRows(block + half); ++i, ++row) {
          __m512 left = _mm512_load_ps(sums[half][0][i]), right = _mm512_load_ps(sums[half][1][i]);
          if (item_.spans == nullptr) {
            factors_[block + half].Add(i, Sums(head, row, d), left, right);
          } else {
            float* to = SpanSums(item_.span, head, row) + kSumsBefore + d;
            _mm512_storeu_ps(to, left), _mm512_storeu_ps(to + kSide, right);
          }
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
        const float* sums = SpanSums(span, head, block * kSide);
        alignas(64) float tops[kSide] = {}, totals[kSide] = {};
        for (int64_t i = 0; i < BlockRows(block); ++i) {
          tops[i] = sums[i * (kSumsBefore + p_.V)], totals[i] = sums[i * (kSumsBefore + p_.V) + 1];
        }
        Factors factors = AddTotals(head * blocks_ + block, {_mm512_load_ps(tops), _mm512_load_ps(totals)});
        for (int64_t i = 0; i < BlockRows(block); ++i, sums += kSumsBefore + p_.V) {
          for (int64_t d = 0; d < p_.V; d += kPair) {
            const float* o = sums + kSumsBefore + d;
            factors.Add(i, Sums(head, block * kSide + i, d), _mm512_loadu_ps(o), _mm512_loadu_ps(o + kSide));
          }
        }
      }
    }
  }
}

void ItemAttention::Write(int64_t head) {
  const __m512i order[2] = {_mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
                            _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
  for (int64_t row = 0; row < of_head_; ++row) {
    bf16* to = Place(p_.o, head, row, p_.V);
    __m512 total = _mm512_set1_ps(totals_[head * blocks_ * kSide + row]);
    for (int64_t d = 0; d < p_.V; d += kPair) {
      const float* o = Sums(head, row, d);
      __m512 low = _mm512_div_ps(_mm512_load_ps(o), total), high = _mm512_div_ps(_mm512_load_ps(o + kSide), total);
      for (int half = 0; half < 2; ++half) {
        avx512::PutRounded(to + d + half * kSide, _mm512_permutex2var_ps(low, order[half], high));
      }
    }
  }
}

void ItemAttention::Attend(const Problem& p, const Item& item, const Item* after) {
  p_ = p, item_ = item;
  Begin();
  int64_t slot_bytes = kSpan * p.Width() * sizeof(bf16);  // of a head
  int64_t together = std::clamp<int64_t>(kAheadBytes / slot_bytes, 1, item.heads);
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
      int64_t steps = (end - begin) * (blocks_ * (p.D / kDepth * 4 + 8) + p.V / kPair * (4 + blocks_) * 8);
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
