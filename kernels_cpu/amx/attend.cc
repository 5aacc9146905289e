// Paged attention over a pool of bf16 with AMX; see paged_attention.h. A span's scores are computed for all of its slots, then
// their weights, then the sum of its values: nothing is rescaled within a span. Prefill and decode are one code.
//
// Query rows are taken in blocks of 16. Scores are computed transposed, [slots][16 rows]: products of keys, as they lie in the
// pool, and of queries, which are packed once an item. A maximum, a sum, an exponential and a mask are then one instruction for
// all rows of a block. Weights are transposed, [16 rows][slots], and multiplied with values, of which two slots are unpacked at
// a time.
//
// KV heads with few query rows, as decode has them, share a block: each head's packed queries have zeros in the rows of the
// other heads, so that the scores of all add up in the same tiles, with the bits that each has alone. But a key that is infinite
// or NaN makes NaN of its query's other heads as well.
#include "../attend.h"
#include "../avx512/lanes.h"
#include "level.h"
#include "tiles.h"

namespace jpaged::amx {
namespace {

using avx512::Transpose;

constexpr int64_t kPair = 2 * kSide;           // query rows, slots or dimensions of two tiles
constexpr int64_t kColumn = 4 * kSide;         // slots of four tiles
constexpr int64_t kTileSize = kSide * kDepth;  // bf16 in a tile
constexpr int64_t kAheadBytes = 512 * 1024;    // of slots that are brought into the L2 cache ahead, at most
constexpr float kLog2E = 1.44269504f;

static_assert(kPair == kDepth && kSpan % kColumn == 0);

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
  WriteBeforeTiles();
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

// sums[i] = the products of a[head][i] and b[head], of all heads; i: one of four operands. a: [heads][kSpan / 16].
template <typename Between>
void MultiplyColumn(const Operand* a, int64_t heads, const bf16* b, int64_t tiles, float* sums, const Between& between) {
  WriteBeforeTiles();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t head = 0; head < heads; ++head) {
    const Operand* rows = a + head * kSpan / kSide;
    for (int64_t i = 0; i < tiles; ++i, b += kTileSize) {
      _tile_loadd(7, b, 64);
      _tile_loadd(4, rows[0].rows + i * rows[0].step, rows[0].stride);
      _tile_dpbf16ps(0, 4, 7);
      between();
      _tile_loadd(5, rows[1].rows + i * rows[1].step, rows[1].stride);
      _tile_dpbf16ps(1, 5, 7);
      between();
      _tile_loadd(6, rows[2].rows + i * rows[2].step, rows[2].stride);
      _tile_dpbf16ps(2, 6, 7);
      between();
      _tile_loadd(4, rows[3].rows + i * rows[3].step, rows[3].stride);
      _tile_dpbf16ps(3, 4, 7);
      between();
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSide * kSide, 64);
  _tile_stored(2, sums + 2 * kSide * kSide, 64);
  _tile_stored(3, sums + 3 * kSide * kSide, 64);
}

// sums[i] = a . b[i] of N operands, each along so many tiles: those that unpack(tile, to) writes, [N][16][32].
template <int N, typename Unpack>
void MultiplyUnpacked(const bf16* a, int64_t tiles, float* sums, const Unpack& unpack) {
  alignas(64) bf16 unpacked[2][N * kTileSize];  // a tile is unpacked while the one before is multiplied
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (N == 4) {
    _tile_zero(2);
    _tile_zero(3);
  }
  unpack(0, unpacked[0]);
  for (int64_t i = 0; i < tiles; ++i) {
    if (i + 1 < tiles) unpack(i + 1, unpacked[(i + 1) % 2]);
    WriteBeforeTiles();
    const bf16* b = unpacked[i % 2];
    _tile_loadd(4, a + i * kTileSize, 64);
    _tile_loadd(5, b, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, b + kTileSize, 64);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (N == 4) {
      _tile_loadd(7, b + 2 * kTileSize, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, b + 3 * kTileSize, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSide * kSide, 64);
  if constexpr (N == 4) {
    _tile_stored(2, sums + 2 * kSide * kSide, 64);
    _tile_stored(3, sums + 3 * kSide * kSide, 64);
  }
}

// sums[i] = a . b[i] of two.
template <typename Between>
void MultiplyRow(const bf16* a, const bf16* b0, const bf16* b1, int64_t tiles, float* const (&sums)[2],
                 const Between& between) {
  WriteBeforeTiles();
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

// The slots that come next, of which so many bytes from `offset` on are brought into the L2 cache, `share` lines a step.
struct Ahead {
  const bf16 *const *slot, *const *end;
  int64_t offset, bytes, share;
  const char *line = nullptr, *line_end = nullptr;  // what is left of the slot before

  void FetchRest() {
    while (slot < end || line < line_end) Fetch(1);
  }
  void Fetch(int64_t shares) {
    for (int64_t count = shares * share; count > 0; --count, line += kCacheLine) {
      if (line == line_end) {
        if (slot == end) return;
        line = reinterpret_cast<const char*>(*slot++ + offset), line_end = line + bytes;
      }
      PrefetchL2(line);
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
  void BeginSums();
  void PackQueries(int64_t group);
  void FetchAhead(const Item& item, int64_t first, int64_t head, int64_t heads, const bf16* const* slots, int64_t steps);
  void AttendSpan(int64_t group, int64_t first);
  void PackKeys(int64_t head, int64_t begin, int64_t end);
  void PackValues(int64_t head, int64_t d, int64_t begin, int64_t end);
  void Score(int64_t group, int64_t block, int64_t begin, int64_t end);
  void CapScores(float* scores, int64_t begin, int64_t end) const;
  Totals Softmax(const BlockPair& rows, int64_t half, int64_t first, int64_t begin, int64_t end, float* scores, bf16* weights);
  void Weigh(int64_t head, int64_t block, int64_t d, int64_t begin, int64_t end);
  template <int N>
  void WeighAlone(int64_t head, int64_t d, int64_t begin, int64_t end);
  void AddWeighed(int64_t head, int64_t block, int64_t d, const float* sums);
  Factors AddTotals(int64_t block, Totals span);
  void AddSpans();
  void Write(int64_t group);

  int64_t GroupHeads(int64_t group) const { return std::min(shared_, item_.heads - group * shared_); }
  int64_t GroupRows(int64_t group) const { return GroupHeads(group) * head_rows_; }
  int64_t BlockRows(int64_t group, int64_t block) const { return std::min(kSide, GroupRows(group) - block * kSide); }
  bool HasSecond(int64_t block) const { return block + 1 < blocks_; }  // of a pair that begins with this block
  // Where a query row of a group lies in q or o.
  int64_t Place(int64_t group, int64_t row, int64_t width) const {
    int64_t head = item_.head + group * shared_;
    for (; row >= head_rows_; row -= head_rows_) ++head;
    return ((item_.token + row / p_.G) * p_.H + head * p_.G + row % p_.G) * width;
  }
  // The sums of 32 dimensions of a query row, from d on.
  float* Sums(int64_t group, int64_t row, int64_t d) const {
    return o_ + ((group * blocks_ + row / kSide) * p_.V + d) * kSide + row % kSide * kPair;
  }
  // What a query row has in a span that is an item: top, total, o.
  float* SpanSums(int64_t span, int64_t group, int64_t row) const {
    return item_.spans->sums + ((span * item_.heads + group * shared_) * head_rows_ + row) * (kSumsBefore + p_.V);
  }

  Problem p_;
  Item item_;
  int64_t shared_, groups_;                      // heads that share blocks, and groups of such heads
  int64_t head_rows_, blocks_;                   // query rows of a head, and blocks of those of a group
  const bf16 *slots_[kSpan], *next_[kSpan];      // of this span, and of the next one
  bool evenly_apart_[kSpan / kSide];             // whether 16 slots are
  Operand key_tiles_[kSide][kSpan / kSide];      // of a group's heads
  Ahead ahead_;
  BlockPair* pairs_;
  bf16* q_;                // [groups][shared heads][blocks][D / 2][16 rows][2]
  bf16* keys_;             // [shared heads][kSpan / 16][D / 32][16 slots][32], those that are not used as they lie
  bf16* values_;           // [2][kSpan / 32][16 pairs of slots][16 dimensions][2], of 32 those that unpacking puts first first
  bf16* weights_;          // [blocks][kSpan / 32][16 rows][32 slots]
  bf16* zeros_;            // one slot of all of the item's heads
  float* scores_;          // [2][kSpan][16 rows]
  float *tops_, *totals_;  // [groups][blocks][16 rows]
  float* o_;               // [groups][blocks][V / 32][16 rows][32], dimensions as in values_
  Factors* factors_;       // [blocks]
  Memory memory_[11];
};

void ItemAttention::Attend(const Problem& p, const Item& item, const Item* after) {
  p_ = p, item_ = item;
  head_rows_ = item.count * p.G;
  int64_t head_bytes = kSpan * p.Width() * sizeof(bf16);
  int64_t together = std::clamp<int64_t>(kAheadBytes / head_bytes, 1, item.heads);  // heads between which memory is fetched
  shared_ = std::clamp<int64_t>(kSide / head_rows_, 1, together), together = together / shared_ * shared_;
  Begin();
  if (item.spans == nullptr) BeginSums();
  int64_t first = item.begin / kSpan * kSpan;
  const bf16* zeros = zeros_;
  Locate(p, item, item.head, first, zeros, slots_);
  for (; first < item.end; first += kSpan) {
    for (int64_t tile = 0; tile < kSpan / kSide; ++tile) {
      const bf16* const* slots = slots_ + tile * kSide;
      evenly_apart_[tile] = true;
      for (int64_t i = 1; i < kSide; ++i) evenly_apart_[tile] &= slots[i] == slots[0] + i * p.Stride();
    }
    const Item* next = first + kSpan < item.end ? &item : after;
    int64_t next_first = next == &item ? first + kSpan : next != nullptr ? next->begin / kSpan * kSpan : 0;
    if (next != nullptr) Locate(p, *next, next->head, next_first, zeros, next_);
    for (int64_t begin = 0; begin < item.heads; begin += together) {
      int64_t end = std::min(begin + together, item.heads);
      int64_t pairs = (blocks_ + 1) / 2, slots = std::min(first + kSpan, item.end) - std::max(first, item.begin);
      int64_t products = pairs * p.D / kDepth * 2 + p.V / kPair * (blocks_ == 1 ? 4 : 1 + 2 * pairs);  // of a head and 32 slots
      int64_t softmaxes = (end - begin + shared_ - 1) / shared_ * blocks_ * 4;
      int64_t steps = ((end - begin) * products + softmaxes) * ((slots + kDepth - 1) / kDepth);
      ahead_ = {};
      if (end < item.heads) {
        FetchAhead(item, first, end, std::min(together, item.heads - end), slots_, steps);
      } else if (next != nullptr) {
        FetchAhead(*next, next_first, 0, std::min(together, next->heads), next_, steps);
      }
      for (int64_t head = begin; head < end; head += shared_) AttendSpan(head / shared_, first);
      ahead_.FetchRest();
    }
    std::memcpy(slots_, next_, sizeof(slots_));
  }
  if (item.spans != nullptr) {
    if (item.spans->left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    BeginSums(), AddSpans();
  }
  for (int64_t group = 0; group < groups_; ++group) Write(group);
}

void ItemAttention::Begin() {
  groups_ = (item_.heads + shared_ - 1) / shared_, blocks_ = (shared_ * head_rows_ + kSide - 1) / kSide;
  int64_t pairs = (blocks_ + 1) / 2, all = groups_ * shared_ * blocks_, zeros = item_.heads * p_.Width();
  pairs_ = Scratch<BlockPair>(memory_[0], pairs), q_ = Scratch<bf16>(memory_[1], all * kSide * p_.D);
  keys_ = Scratch<bf16>(memory_[2], shared_ * kSpan * p_.D), values_ = Scratch<bf16>(memory_[3], kSpan * kPair);
  weights_ = Scratch<bf16>(memory_[4], blocks_ * kSpan * kSide), zeros_ = Scratch<bf16>(memory_[5], zeros);
  scores_ = Scratch<float>(memory_[6], kPair * kSpan), factors_ = Scratch<Factors>(memory_[7], blocks_);
  std::fill(zeros_, zeros_ + zeros, 0);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    BlockPair& rows = pairs_[pair];
    for (int64_t i = 0; i < kPair; ++i) {  // past the end, any row again
      int64_t row = shared_ > 1 ? i % head_rows_ : std::min(pair * kPair + i, head_rows_ - 1);
      int64_t token = row / p_.G, position = item_.position + token;
      int64_t low = p_.window > 0 ? std::max<int64_t>(0, position + 1 - p_.window) : 0;
      int64_t high = Past(p_, item_.token + token, position);
      rows.low[i] = low, rows.high[i] = high;
      if (i == 0) rows.begin = rows.all_begin = low, rows.end = rows.all_end = high;
      rows.begin = std::min(rows.begin, low), rows.all_begin = std::max(rows.all_begin, low);
      rows.end = std::max(rows.end, high), rows.all_end = std::min(rows.all_end, high);
    }
  }
  for (int64_t group = 0; group < groups_; ++group) PackQueries(group);
}

void ItemAttention::BeginSums() {
  int64_t rows = groups_ * blocks_ * kSide;
  tops_ = Scratch<float>(memory_[8], rows), totals_ = Scratch<float>(memory_[9], rows);
  o_ = Scratch<float>(memory_[10], rows * p_.V);
  std::fill(tops_, tops_ + rows, kMasked), std::fill(totals_, totals_ + rows, 0.0f), std::fill(o_, o_ + rows * p_.V, 0.0f);
  if (p_.sinks == nullptr) return;
  for (int64_t group = 0; group < groups_; ++group) {
    for (int64_t row = 0; row < GroupRows(group); ++row) {  // a score before any other
      int64_t i = group * blocks_ * kSide + row;
      tops_[i] = p_.sinks[Place(group, row, 1) % p_.H], totals_[i] = 1.0f;
    }
  }
}

// Packs the query rows of a group's heads, each head's with zeros in the rows of others.
void ItemAttention::PackQueries(int64_t group) {
  bf16* packed = q_ + group * shared_ * blocks_ * kSide * p_.D;
  for (int64_t head = 0; head < GroupHeads(group); ++head) {
    for (int64_t block = 0; block < blocks_; ++block) {
      const bf16* from[kSide];
      for (int64_t i = 0, row = block * kSide; i < kSide; ++i, ++row) {
        bool is_of_head = row >= head * head_rows_ && row < (head + 1) * head_rows_;
        from[i] = is_of_head ? p_.q + Place(group, row, p_.D) : zeros_;
      }
      for (int64_t d = 0; d < p_.D; d += kDepth, packed += kTileSize) {
        __m512i rows[kSide];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kSide; ++i) rows[i] = _mm512_loadu_si512(from[i] + d);
        Transpose(rows, packed, kDepth);
      }
    }
  }
}

// Has some heads of an item's slots, of the span from `first` on, fetched in so many steps.
void ItemAttention::FetchAhead(const Item& item, int64_t first, int64_t head, int64_t heads, const bf16* const* slots,
                               int64_t steps) {
  int64_t begin = std::max(first, item.begin) - first, end = std::min(first + kSpan, item.end) - first;
  int64_t bytes = heads * p_.Width() * sizeof(bf16);
  ahead_ = {slots + begin, slots + end, head * p_.Apart(), bytes, (end - begin) * bytes / (kCacheLine * steps) + 1};
}

void ItemAttention::AttendSpan(int64_t group, int64_t first) {
  int64_t begin = std::max(first, item_.begin) - first, end = std::min(first + kSpan, item_.end) - first;
  // Calls body(block, begin, end) for each pair of blocks, with the slots that any of its rows sees, in whole 32.
  auto each_pair = [&](const auto& body) {
    for (int64_t block = 0; block < blocks_; block += 2) {
      const BlockPair& rows = pairs_[block / 2];
      int64_t low = std::max(rows.begin - first, begin) / kDepth * kDepth;
      int64_t high = (std::min(rows.end - first, end) + kDepth - 1) / kDepth * kDepth;
      if (low < high) body(block, low, high);
    }
  };
  int64_t head = group * shared_, last = head + GroupHeads(group);
  for (int64_t h = head; h < last; ++h) PackKeys(h, begin / kColumn * kColumn, (end + kColumn - 1) / kColumn * kColumn);
  each_pair([&](int64_t pair, int64_t low, int64_t high) {
    Score(group, pair, low, high);
    for (int64_t half = 0; half < 1 + HasSecond(pair); ++half) {
      int64_t block = pair + half;
      float* scores = scores_ + half * kSpan * kSide;
      Totals totals = Softmax(pairs_[pair / 2], half, first, low, high, scores, weights_ + block * kSpan * kSide);
      if (item_.spans == nullptr) {
        factors_[block] = AddTotals(group * blocks_ + block, totals);
        continue;
      }
      for (int64_t i = 0; i < BlockRows(group, block); ++i) {
        float* sums = SpanSums(item_.span, group, block * kSide + i);
        sums[0] = totals.top[i], sums[1] = totals.total[i];
      }
    }
  });
  for (; head < last; ++head) {
    if (blocks_ == 1) {
      each_pair([&](int64_t, int64_t low, int64_t high) {
        int64_t d = 0;
        for (; d + 2 * kPair <= p_.V; d += 2 * kPair) WeighAlone<4>(head, d, low, high);
        if (d < p_.V) WeighAlone<2>(head, d, low, high);
      });
      continue;
    }
    for (int64_t d = 0; d < p_.V; d += kPair) {
      PackValues(head, d, begin / kDepth * kDepth, (end + kDepth - 1) / kDepth * kDepth);
      each_pair([&](int64_t pair, int64_t low, int64_t high) { Weigh(head, pair, d, low, high); });
    }
  }
}

// Copies keys of slots that do not lie evenly apart, and all where several products read them.
void ItemAttention::PackKeys(int64_t head, int64_t begin, int64_t end) {
  int64_t offset = head * p_.Apart(), in_group = head % shared_;
  for (int64_t tile = begin / kSide; tile < end / kSide; ++tile) {
    const bf16* const* slots = slots_ + tile * kSide;
    if (evenly_apart_[tile] && blocks_ <= 2) {
      key_tiles_[in_group][tile] = {slots[0] + offset, p_.Stride() * int64_t{sizeof(bf16)}, kDepth};
      continue;
    }
    bf16* to = keys_ + (in_group * kSpan + tile * kSide) * p_.D;
    key_tiles_[in_group][tile] = Packed(to);
    for (int64_t slot = 0; slot < kSide; ++slot, to += kDepth) {
      for (int64_t d = 0; d < p_.D; d += kDepth) {
        _mm512_store_si512(to + d * kSide, _mm512_loadu_si512(slots[slot] + offset + d));
      }
    }
  }
}

// Unpacks 32 dimensions of the values of 32 slots, two slots at a time. low, high: [16 pairs of slots][16 dimensions][2]. Calls
// `between` four times.
template <typename Between>
void UnpackValues(const bf16* const* slots, int64_t offset, bf16* low, bf16* high, const Between& between) {
  for (int64_t slot = 0; slot < kDepth; slot += 8, slots += 8, between()) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < 8; i += 2, low += kDepth, high += kDepth) {
      __m512i x = _mm512_loadu_si512(slots[i] + offset), y = _mm512_loadu_si512(slots[i + 1] + offset);
      _mm512_store_si512(low, _mm512_unpacklo_epi16(x, y)), _mm512_store_si512(high, _mm512_unpackhi_epi16(x, y));
    }
  }
}

// Unpacks the dimensions [d, d + 32) of the values of these slots, whole 32.
void ItemAttention::PackValues(int64_t head, int64_t d, int64_t begin, int64_t end) {
  int64_t offset = head * p_.Apart() + p_.ValueAt() + d;
  for (int64_t slot = begin; slot < end; slot += kDepth) {
    bf16* low = values_ + slot * kSide;
    UnpackValues(slots_ + slot, offset, low, low + kSpan * kSide, [] {});
    ahead_.Fetch(1);
  }
}

// The products of a pair of blocks, or of the last block, with the keys of slots [begin, end).
void ItemAttention::Score(int64_t group, int64_t block, int64_t begin, int64_t end) {
  auto fetch = [&] { ahead_.Fetch(HasSecond(block) ? 2 : 1); };
  const bf16* q = q_ + (group * shared_ * blocks_ + block) * kSide * p_.D;
  int64_t tiles = p_.D / kDepth;
  if (!HasSecond(block)) {
    for (int64_t slot = begin / kColumn * kColumn; slot < end; slot += kColumn) {
      MultiplyColumn(key_tiles_[0] + slot / kSide, GroupHeads(group), q, tiles, scores_ + slot * kSide, fetch);
    }
    return;
  }
  for (int64_t slot = begin; slot < end; slot += kPair) {
    const Operand* keys = key_tiles_[0] + slot / kSide;
    float *left = scores_ + slot * kSide, *right = left + kSpan * kSide;
    MultiplyPairs(keys[0], keys[1], q, q + kSide * p_.D, tiles,
                  {{left, right}, {left + kSide * kSide, right + kSide * kSide}}, fetch);
  }
}

// Scales scores, and bends them by the soft cap: cap * tanh(x / cap).
void ItemAttention::CapScores(float* scores, int64_t begin, int64_t end) const {
  const __m512 one = _mm512_set1_ps(1.0f), cap = _mm512_set1_ps(p_.soft_cap);
  const __m512 factor = _mm512_set1_ps(p_.scale / p_.soft_cap);
  for (int64_t slot = begin; slot < end; ++slot) {
    __m512 x = _mm512_mul_ps(_mm512_load_ps(scores + slot * kSide), factor);
    // Where tanh is 1 already; a NaN stays, as it comes second.
    x = _mm512_max_ps(_mm512_set1_ps(-20.0f), _mm512_min_ps(_mm512_set1_ps(20.0f), x));
    __m512 power = Exp<avx512::Lanes>(_mm512_add_ps(x, x));
    __m512 tanh = _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
    _mm512_store_ps(scores + slot * kSide, _mm512_mul_ps(cap, tanh));
  }
}

// Makes weights, relative to a row's largest score, of the scores of slots [begin, end) from `first` on, whole 32; 0 where a
// row does not see the slot.
Totals ItemAttention::Softmax(const BlockPair& rows, int64_t half, int64_t first, int64_t begin, int64_t end, float* scores,
                              bf16* weights) {
  if (p_.soft_cap > 0) CapScores(scores, begin, end);
  float scale = p_.soft_cap > 0 ? 1.0f : p_.scale;
  // Of these slots all rows see [all_begin, all_end), whole 32.
  int64_t all_begin = std::clamp((rows.all_begin - first + kDepth - 1) / kDepth * kDepth, begin, end);
  int64_t all_end = std::clamp((rows.all_end - first) / kDepth * kDepth, all_begin, end);
  __m512i low = _mm512_sub_epi32(_mm512_load_si512(rows.low + half * kSide), _mm512_set1_epi32(first));
  __m512i high = _mm512_sub_epi32(_mm512_load_si512(rows.high + half * kSide), _mm512_set1_epi32(first));
  auto seen = [&](int64_t slot) {
    __m512i at = _mm512_set1_epi32(slot);
    return _mm512_mask_cmpgt_epi32_mask(_mm512_cmple_epi32_mask(low, at), high, at);
  };
  auto in_turn = [&](const auto& seen_in_part, const auto& seen_by_all) {
    seen_in_part(begin, all_begin), seen_by_all(all_begin, all_end), seen_in_part(all_end, end);
  };

  __m512 tops[4];  // a maximum is waited for
  for (__m512& top : tops) top = _mm512_set1_ps(kMasked);
  auto score = [&](int64_t slot) { return _mm512_load_ps(scores + slot * kSide); };
  in_turn(
      [&](int64_t slot, int64_t to) {
        for (; slot < to; ++slot) tops[0] = _mm512_mask_max_ps(tops[0], seen(slot), tops[0], score(slot));
      },
      [&](int64_t slot, int64_t to) {
        for (; slot < to; slot += 4) {
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) tops[i] = _mm512_max_ps(tops[i], score(slot + i));
        }
      });
  __m512 top = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
  top = _mm512_mul_ps(top, _mm512_set1_ps(scale));

  const __m512 factor = _mm512_set1_ps(scale * kLog2E), base = _mm512_mul_ps(top, _mm512_set1_ps(kLog2E));
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  auto weight = [&](int64_t slot) { return PowerOfTwo(_mm512_fmsub_ps(score(slot), factor, base)); };
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i order = _mm512_or_si512(lanes, _mm512_slli_epi32(_mm512_add_epi32(lanes, _mm512_set1_epi32(kSide)), 16));
  // Rounds the weights of two slots, in pairs. Sums are those of rounded weights.
  auto pair_of = [&](__m512 x, __m512 y) {
    __m512i pairs = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(y, x));
    even = _mm512_add_ps(even, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
    odd = _mm512_add_ps(odd, _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000))));
    return pairs;
  };
  __m512i pairs[kSide];
  in_turn(
      [&](int64_t slot, int64_t to) {
        for (; slot < to; slot += kDepth) {
          auto masked = [&](int64_t at) { return _mm512_maskz_mov_ps(seen(at), weight(at)); };
#pragma GCC unroll 16
          for (int i = 0; i < kSide; ++i) pairs[i] = pair_of(masked(slot + 2 * i), masked(slot + 2 * i + 1));
          Transpose(pairs, weights + slot * kSide, kDepth), ahead_.Fetch(4);
        }
      },
      [&](int64_t slot, int64_t to) {
        for (; slot < to; slot += kDepth) {
#pragma GCC unroll 16
          for (int i = 0; i < kSide; ++i) {
            pairs[i] = pair_of(weight(slot + 2 * i), weight(slot + 2 * i + 1));
            if (i % 4 == 3) ahead_.Fetch(1);
          }
          Transpose(pairs, weights + slot * kSide, kDepth);
        }
      });
  return {top, _mm512_add_ps(even, odd)};
}

// Adds up the values of slots [begin, end), dimensions [d, d + 32), by the weights of a pair of blocks, or of the last block.
void ItemAttention::Weigh(int64_t head, int64_t block, int64_t d, int64_t begin, int64_t end) {
  auto fetch = [&] { ahead_.Fetch(2); };
  const bf16 *low = values_ + begin * kSide, *high = low + kSpan * kSide;
  const bf16 *weights = weights_ + (block * kSpan + begin) * kSide, *second = weights + kSpan * kSide;
  alignas(64) float sums[2][2][kSide][kSide];  // of a block: those of low and of high dimensions
  int64_t tiles = (end - begin) / kDepth;
  if (HasSecond(block)) {
    MultiplyPairs(Packed(weights), Packed(second), low, high, tiles,
                  {{sums[0][0][0], sums[0][1][0]}, {sums[1][0][0], sums[1][1][0]}}, fetch);
    AddWeighed(head, block + 1, d, sums[1][0][0]);
  } else {
    MultiplyRow(weights, low, high, tiles, {sums[0][0][0], sums[0][1][0]}, fetch);
  }
  AddWeighed(head, block, d, sums[0][0][0]);
}

// The same of the only block and of 16 N dimensions. Values are unpacked right before their product.
template <int N>
void ItemAttention::WeighAlone(int64_t head, int64_t d, int64_t begin, int64_t end) {
  alignas(64) float sums[N][kSide][kSide];
  int64_t offset = head * p_.Apart() + p_.ValueAt() + d;
  MultiplyUnpacked<N>(weights_ + begin * kSide, (end - begin) / kDepth, sums[0][0], [&](int64_t tile, bf16* to) {
    for (int64_t i = 0; i < N; i += 2, to += 2 * kTileSize) {
      UnpackValues(slots_ + begin + tile * kDepth, offset + i * kSide, to, to + kTileSize, [&] { ahead_.Fetch(1); });
    }
  });
  for (int64_t i = 0; i < N; i += 2) AddWeighed(head, 0, d + i * kSide, sums[i][0]);
}

// Adds what a span has of 32 dimensions to the sums of the block's rows that are this head's. sums: [2][16 rows][16].
void ItemAttention::AddWeighed(int64_t head, int64_t block, int64_t d, const float* sums) {
  int64_t group = shared_ > 1 ? head / shared_ : head, from = (head - group * shared_) * head_rows_, before = block * kSide;
  int64_t begin = std::max(from, before) - before, end = std::min(from + head_rows_, before + kSide) - before;
  sums += begin * kSide;
  if (item_.spans != nullptr) {
    for (int64_t i = begin; i < end; ++i, sums += kSide) {
      float* to = SpanSums(item_.span, group, before + i) + kSumsBefore + d;
      _mm512_storeu_ps(to, _mm512_load_ps(sums)), _mm512_storeu_ps(to + kSide, _mm512_load_ps(sums + kSide * kSide));
    }
    return;
  }
  float* to = Sums(group, before + begin, d);
  for (int64_t i = begin; i < end; ++i, sums += kSide, to += kPair) {
    factors_[block].Add(i, to, _mm512_load_ps(sums), _mm512_load_ps(sums + kSide * kSide));
  }
}

// Adds the totals of a span to those of a block.
Factors ItemAttention::AddTotals(int64_t block, Totals span) {
  float *tops = tops_ + block * kSide, *totals = totals_ + block * kSide;
  __m512 top = _mm512_load_ps(tops), most = _mm512_max_ps(top, span.top);
  __m512 before = Exp<avx512::Lanes>(_mm512_sub_ps(top, most)), now = Exp<avx512::Lanes>(_mm512_sub_ps(span.top, most));
  __m512 total = _mm512_fmadd_ps(_mm512_load_ps(totals), before, _mm512_mul_ps(span.total, now));
  Factors factors;
  _mm512_store_ps(factors.before, before), _mm512_store_ps(factors.now, now);
  factors.seen = _mm512_cmp_ps_mask(span.total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  _mm512_mask_store_ps(tops, factors.seen, most), _mm512_mask_store_ps(totals, factors.seen, total);
  return factors;
}

// Adds up the spans that several threads have computed.
void ItemAttention::AddSpans() {
  int64_t size = kSumsBefore + p_.V;
  for (int64_t span = 0; span < item_.spans->count; ++span) {
    for (int64_t group = 0; group < groups_; ++group) {
      for (int64_t block = 0; block < blocks_; ++block) {
        const float* sums = SpanSums(span, group, block * kSide);
        alignas(64) float tops[kSide] = {}, totals[kSide] = {};
        for (int64_t i = 0; i < BlockRows(group, block); ++i) tops[i] = sums[i * size], totals[i] = sums[i * size + 1];
        Factors factors = AddTotals(group * blocks_ + block, {_mm512_load_ps(tops), _mm512_load_ps(totals)});
        for (int64_t i = 0; i < BlockRows(group, block); ++i, sums += size) {
          for (int64_t d = 0; d < p_.V; d += kPair) {
            const float* o = sums + kSumsBefore + d;
            factors.Add(i, Sums(group, block * kSide + i, d), _mm512_loadu_ps(o), _mm512_loadu_ps(o + kSide));
          }
        }
      }
    }
  }
}

void ItemAttention::Write(int64_t group) {
  for (int64_t row = 0, rows = GroupRows(group); row < rows; ++row) {
    bf16* to = p_.o + Place(group, row, p_.V);
    __m512 total = _mm512_set1_ps(totals_[group * blocks_ * kSide + row]);
    for (int64_t d = 0; d < p_.V; d += kPair) {
      const float* o = Sums(group, row, d);
      avx512::PutUnpacked(to + d, _mm512_div_ps(_mm512_load_ps(o), total), _mm512_div_ps(_mm512_load_ps(o + kSide), total));
    }
  }
}

}  // namespace

void Attend(const Problem& p, const Item& item, const Item* after) {
  Tiles tiles_of_this_thread;
  static thread_local ItemAttention attention;
  attention.Attend(p, item, after);
}

}  // namespace jpaged::amx
