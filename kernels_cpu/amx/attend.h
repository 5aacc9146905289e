// Paged attention of one item with AMX, for every kind of pool that has tiles of its own; see paged_attention.h. A span's scores
// are computed for all of its slots, then their weights, then the sum of its values: nothing is rescaled within a span. Prefill
// and decode have one arithmetic.
//
// Query rows are taken in blocks of 16. Scores are computed transposed, [slots][16 rows]: products of keys, as they lie in the
// pool, and of queries, which are packed once an item. A maximum, a sum, an exponential and a mask are then one instruction for
// all rows of a block. Weights are transposed, [16 rows][slots], and multiplied with values, of which the slots of a product's
// step are unpacked at a time.
//
// KV heads with few query rows, as decode has them, share a block: each head's packed queries have zeros in the rows of the
// other heads, so that the scores of all add up in the same tiles, with the bits that each has alone.
//
// attend.cc multiplies over a pool of bf16, attend_int8.cc over one of int8.
#pragma once

#include <limits>

#include "../attend.h"
#include "../avx512/lanes.h"
#include "tiles.h"

namespace jpaged::amx {

constexpr int64_t kPair = 2 * kSide;         // query rows, slots or dimensions of two tiles
constexpr int64_t kAheadBytes = 256 * 1024;  // of slots that are brought into the L2 cache ahead, at most
constexpr float kLog2E = 1.44269504f;

// Returns 2^x to 3e-6 of it, before it is rounded to bf16; NaN of NaN. For x far below 0 it is 0.
inline __m512 PowerOfTwo(__m512 x) {
  __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(0.013534168f);
  for (float c : {0.052011464f, 0.24144275f, 0.69300383f, 1.0000026f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, x);
}

// The slots that come next, of which so many bytes from `offset` on, and of their scales if they have any, are brought into the
// L2 cache, evenly: a core waits for few lines at a time, and what is asked for beyond them delays what it reads. A share is so
// many kUnit-ths of a line. After them come rows of queries and of results.
template <typename Slot>
struct Ahead {
  static constexpr int64_t kUnit = 256;
  struct Rows {
    const bf16* first;
    int64_t numbers, stride, left;  // of a row, from one to the next, and how many rows
  };

  const Slot *const *slot, *const *end;
  int64_t offset, bytes, share;
  const float* const* scales = nullptr;  // of each slot, where it has any
  int64_t scale_bytes = 0;
  int64_t due = 0;  // units
  const char *line = nullptr, *line_end = nullptr;  // what is left of the slot, or row, before
  Rows rows[2] = {};                                // of queries, and of results

  // Has these rows fetched as well, in so many shares.
  void Add(int64_t i, const Rows& added, int64_t shares) {
    rows[i] = added;
    share += added.left * added.numbers * int64_t{sizeof(bf16)} / kCacheLine * kUnit / shares + 1;
  }
  void FetchRest() {
    for (; line < line_end || NextSlot(); line += kCacheLine) PrefetchL2(line);
  }
  void Fetch(int64_t shares) {
    if ((due += shares * share) < kUnit) return;
    for (; due >= kUnit && (line < line_end || NextSlot()); due -= kUnit, line += kCacheLine) PrefetchL2(line);
  }

 private:
  bool NextRow() {
    for (Rows& some : rows) {
      if (some.left == 0) continue;
      line = reinterpret_cast<const char*>(some.first), line_end = line + some.numbers * sizeof(bf16);
      some.first += some.stride, --some.left;
      return true;
    }
    return false;
  }
  bool NextSlot() {
    if (slot == end) return NextRow();
    line = reinterpret_cast<const char*>(*slot++ + offset), line_end = line + bytes;
    if constexpr (sizeof(Slot) == 1) {
      const char* from = reinterpret_cast<const char*>(*scales++);
      for (int64_t i = 0; i < scale_bytes; i += kCacheLine) PrefetchL2(from + i);
    }
    return true;
  }
};

// The query rows of two blocks: which positions a row sees, and which are seen by any row of a block and by all.
struct BlockPair {
  struct Block {
    int64_t begin, end, all_begin, all_end;
  };

  alignas(64) int32_t low[kPair], high[kPair];
  Block blocks[2];

  int64_t Begin() const { return std::min(blocks[0].begin, blocks[1].begin); }
  int64_t End() const { return std::max(blocks[0].end, blocks[1].end); }
};

// What a block of query rows has in a span: the largest score and the sum of the weights.
struct Totals {
  __m512 top, total;
};

// By what the sums of a block until now are multiplied, and those of the span that is added; in rows that saw any of the span.
// What is in memory as the sums of rows that saw nothing before may be anything, and counts as zeros.
struct alignas(64) Factors {
  float before[kSide], now[kSide];
  __mmask16 seen, saw_before;

  // sums = before * sums + now * o of a row: 32 numbers.
  void Add(int64_t row, float* sums, __m512 low, __m512 high) const {
    if ((seen >> row & 1) == 0) return;
    bool has_sums = saw_before >> row & 1;
    __m512 by = _mm512_set1_ps(before[row]), added_by = _mm512_set1_ps(now[row]);
    for (__m512 added : {low, high}) {
      __m512 sum = has_sums ? _mm512_load_ps(sums) : _mm512_setzero_ps();
      _mm512_store_ps(sums, _mm512_fmadd_ps(sum, by, _mm512_mul_ps(added, added_by)));
      sums += kSide;
    }
  }
  // The same of all rows of a block. sums: [16 rows][32]; o: [2][16 rows][16].
  void AddBlock(float* sums, const float* o) const {
    const float *low = o, *high = o + kSide * kSide;
    if (seen != 0xffff || saw_before != 0xffff) {
      for (int64_t row = 0; row < kSide; ++row) {
        Add(row, sums + row * kPair, _mm512_load_ps(low + row * kSide), _mm512_load_ps(high + row * kSide));
      }
      return;
    }
#pragma GCC unroll 4
    for (int64_t row = 0; row < kSide; ++row, sums += kPair) {
      __m512 by = _mm512_set1_ps(before[row]), added_by = _mm512_set1_ps(now[row]);
      auto add = [&](float* to, const float* from) {
        _mm512_store_ps(to, _mm512_fmadd_ps(_mm512_load_ps(to), by, _mm512_mul_ps(_mm512_load_ps(from + row * kSide), added_by)));
      };
      add(sums, low), add(sums + kSide, high);
    }
  }
};

// Slots [begin, end) of a span.
struct SlotRange {
  int64_t begin, end;
};

// Which slots of a span the rows of a block see: of [begin, end) all rows see [all_begin, all_end), whole steps all of them, and
// none sees any before any_begin or from any_end on.
struct Seen {
  int64_t begin, all_begin, all_end, end, any_begin, any_end;
  __m512i low, count;  // of each row: the first slot that it sees, and how many

  __mmask16 operator()(int64_t slot) const {
    return _mm512_cmplt_epu32_mask(_mm512_sub_epi32(_mm512_set1_epi32(slot), low), count);
  }
  // Goes through the slots in order: in_part(begin, end) where some rows see them, by_all(begin, end) where all do.
  template <typename InPart, typename ByAll>
  void InTurn(const InPart& in_part, const ByAll& by_all) const {
    in_part(begin, all_begin), by_all(all_begin, all_end), in_part(all_end, end);
  }
};

// Returns each row's largest score of the slots that it sees. scores: [slots][16 rows].
inline __m512 Largest(const Seen& seen, const float* scores) {
  __m512 tops[4];  // a maximum is waited for
  for (__m512& top : tops) top = _mm512_set1_ps(kMasked);
  auto score = [&](int64_t slot) { return _mm512_load_ps(scores + slot * kSide); };
  seen.InTurn(
      [&](int64_t slot, int64_t to) {
        for (slot = std::max(slot, seen.any_begin), to = std::min(to, seen.any_end); slot < to; ++slot) {
          tops[0] = _mm512_mask_max_ps(tops[0], seen(slot), tops[0], score(slot));
        }
      },
      [&](int64_t slot, int64_t to) {
        for (; slot < to; slot += 4) {
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) tops[i] = _mm512_max_ps(tops[i], score(slot + i));
        }
      });
  return _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
}

// A thread's work on items, one after the other, in memory that it keeps. `Products` is derived from it, and has
//   Slot: what the pool holds; kStep: slots of a step of the products with values; kMostShared: heads that share a block at most
//   Begin(): takes memory for an item; PackQueries(group)
//   Shares(heads): how often memory is fetched while so many heads of 32 slots are at work
//   AttendSpan(group, first): the totals and sums of a span
//   WritesEarly(): whether AttendSpan writes the results of rows that see no later span
//   Write(group): writes the others, unless the one here does
//   TogetherBytes() and AttendHeads(), if those here do not serve it
//   Put(to, low, high): 32 dimensions of a result, from the order in which o_ has them
template <typename Products, typename Slot>
class SpanAttention {
 public:
  void Attend(const Problem& p, const Item& item, const Item* after);

 protected:
  static constexpr bool kIsScaled = sizeof(Slot) == 1;

  // How many bytes of a span the heads have that are at work together. Memory is fetched in pieces of so many heads.
  int64_t TogetherBytes() const { return kAheadBytes; }
  // Attends heads [begin, end) of a span. fetch_next(most, shares) has what comes after them fetched in so many shares: its slots
  // up to the next multiple of `most`.
  template <typename FetchNext>
  void AttendHeads(int64_t begin, int64_t end, int64_t first, const FetchNext& fetch_next) {
    fetch_next(kSpan, Self().Shares(end - begin) * StepsOf(InSpan(item_, first)));
    for (int64_t head = begin; head < end; head += shared_) Self().AttendSpan(head / shared_, first);
  }

  // Where an item's rows of queries or of results lie, those of a token as one.
  typename Ahead<Slot>::Rows RowsOfItem(const bf16* rows, const Item& item, int64_t width) const {
    int64_t first = item.token * p_.H + item.head * p_.G;
    return {rows + first * width, item.heads * p_.G * width, p_.H * width, item.count};
  }
  // The slots of a span that an item sees, and of how many steps of 32 slots they are.
  static SlotRange InSpan(const Item& item, int64_t first) {
    return {std::max(first, item.begin) - first, std::min(first + kSpan, item.end) - first};
  }
  static int64_t StepsOf(const SlotRange& slots) { return (slots.end - slots.begin + kDepth - 1) / kDepth; }
  // Calls body(pair, begin, end) for each pair of blocks, with the slots of a span that any of its rows sees, in whole steps.
  template <typename Body>
  void EachPair(int64_t first, const Body& body) const {
    SlotRange slots = InSpan(item_, first);
    for (int64_t block = 0; block < blocks_; block += 2) {
      const BlockPair& rows = pairs_[block / 2];
      int64_t low = std::max(rows.Begin() - first, slots.begin) / Products::kStep * Products::kStep;
      int64_t high = (std::min(rows.End() - first, slots.end) + Products::kStep - 1) / Products::kStep * Products::kStep;
      if (low < high) body(block, low, high);
    }
  }
  // Transposes 16 words of each of a block's query rows, and writes them for each head of the group, `apart` numbers apart: zeros
  // in the rows of other heads.
  template <typename Number>
  void StoreOfHeads(int64_t group, int64_t block, __m512i (&rows)[kSide], Number* packed, int64_t apart) const {
    avx512::Transpose(rows, [&](int64_t j, __m512i words) { _mm512_store_si512((char*)packed + j * kCacheLine, words); });
    for (int64_t head = GroupHeads(group) - 1; shared_ > 1 && head >= 0; --head) {  // the first one, which is read, last
      int64_t row, end;
      RowsOf(group * shared_ + head, block, &row, &end);
      __mmask16 mask = row < end ? (1u << end) - (1u << row) : 0;
      for (int64_t j = 0; j < kSide; ++j) {
        __m512i words = _mm512_load_si512((char*)packed + j * kCacheLine);
        _mm512_store_si512((char*)(packed + head * apart) + j * kCacheLine, _mm512_maskz_mov_epi32(mask, words));
      }
    }
  }
  void FetchAhead(bool is_next, const SlotRange& slots, int64_t head, int64_t heads, int64_t shares);
  Seen SeenBy(const BlockPair& rows, int64_t half, int64_t first, int64_t begin, int64_t end) const;
  void CapScores(float* scores, int64_t begin, int64_t end) const;
  void TakeTotals(int64_t group, int64_t block, Totals totals);
  void AddSums(int64_t group, int64_t block, int64_t row, int64_t d, __m512 low, __m512 high);
  void Write(int64_t group);
  // The sums of 32 dimensions of a query row, from d on.
  float* Sums(int64_t group, int64_t row, int64_t d) const {
    return o_ + ((group * blocks_ + row / kSide) * p_.V + d) * kSide + row % kSide * kPair;
  }

  int64_t GroupHeads(int64_t group) const { return std::min(shared_, item_.heads - group * shared_); }
  int64_t GroupRows(int64_t group) const { return GroupHeads(group) * head_rows_; }
  int64_t BlockRows(int64_t group, int64_t block) const { return std::min(kSide, GroupRows(group) - block * kSide); }
  bool HasSecond(int64_t block) const { return block + 1 < blocks_; }  // of a pair that begins with this block
  // Calls body(row, place) for the query rows of a block in order, with the place of each among the query heads of all tokens.
  template <typename Body>
  void EachRow(int64_t group, int64_t block, const Body& body) const {
    int64_t first = block * kSide, token = first / p_.G, g = first % p_.G, head = item_.head + group * shared_;
    for (int64_t row = 0, rows = BlockRows(group, block); row < rows; ++row) {
      body(row, (item_.token + token) * p_.H + head * p_.G + g);
      if (++g < p_.G) continue;
      g = 0;
      if (++token == item_.count) token = 0, ++head;  // blocks of several heads are their heads' only ones
    }
  }
  // The rows [begin, end) of a block that are those of a head.
  void RowsOf(int64_t head, int64_t block, int64_t* begin, int64_t* end) const {
    int64_t from = (head - GroupOf(head) * shared_) * head_rows_, before = block * kSide;
    *begin = std::max(from, before) - before, *end = std::min(from + head_rows_, before + kSide) - before;
  }
  int64_t GroupOf(int64_t head) const { return shared_ > 1 ? head / shared_ : head; }

  Problem p_;
  Item item_;
  int64_t shared_, groups_;                   // heads that share blocks, and groups of such heads
  int64_t together_;                          // heads between which memory is fetched
  int64_t head_rows_, blocks_;                // query rows of a head, and blocks of those of a group
  const Slot *slots_[kSpan], *next_[kSpan];   // of this span, and of the next one
  const float *scales_[kSpan], *next_scales_[kSpan];  // of the item's first head; null where a slot is not seen
  bool evenly_apart_[kSpan / kSide];          // whether 16 slots are
  Ahead<Slot> ahead_;
  BlockPair* pairs_;
  Slot* zeros_;            // one slot of all of the item's heads
  float *tops_, *totals_;  // [groups][blocks][16 rows]
  float* o_;               // [groups][blocks][V / 32][16 rows][32]
  Factors* factors_;       // [blocks]

 private:
  void BeginItem();
  void BeginSums();
  void LocateSpan(const Item& item, int64_t first, const Slot* (&slots)[kSpan], const float* (&scales)[kSpan]) const;
  Factors AddTotals(int64_t block, Totals span);
  void AddSpans();

  // What a query row has in a span that is an item: top, total, o.
  float* SpanSums(int64_t span, int64_t group, int64_t row) const {
    return item_.spans->sums + ((span * item_.heads + group * shared_) * head_rows_ + row) * (kSumsBefore + p_.V);
  }
  Products& Self() { return *static_cast<Products*>(this); }

  Memory memory_[6];
};

template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::Attend(const Problem& p, const Item& item, const Item* after) {
  p_ = p, item_ = item;
  head_rows_ = item.count * p.G;
  int64_t head_bytes = kSpan * p.Width() * sizeof(Slot);
  together_ = std::clamp<int64_t>(Self().TogetherBytes() / head_bytes, 1, item.heads);
  shared_ = std::clamp<int64_t>(kSide / head_rows_, 1, std::min(Products::kMostShared, together_));
  together_ = together_ / shared_ * shared_;
  BeginItem();
  if (item.spans == nullptr) BeginSums();
  int64_t first = item.begin / kSpan * kSpan;
  LocateSpan(item, first, slots_, scales_);
  for (; first < item.end; first += kSpan) {
    for (int64_t tile = 0; tile < kSpan / kSide; ++tile) {
      const Slot* const* slots = slots_ + tile * kSide;
      const __m512i eight = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7), apart = _mm512_set1_epi64(p.Stride() * sizeof(Slot));
      __m512i even = _mm512_add_epi64(_mm512_set1_epi64((int64_t)slots[0]), _mm512_mullo_epi64(eight, apart));
      __m512i after_even = _mm512_add_epi64(even, _mm512_slli_epi64(apart, 3));
      evenly_apart_[tile] = _mm512_cmpeq_epi64_mask(even, _mm512_loadu_si512(slots)) == 0xff &&
                            _mm512_cmpeq_epi64_mask(after_even, _mm512_loadu_si512(slots + 8)) == 0xff;
    }
    const Item* next = first + kSpan < item.end ? &item : after;
    int64_t next_first = next == &item ? first + kSpan : next != nullptr ? next->begin / kSpan * kSpan : 0;
    if (next != nullptr) LocateSpan(*next, next_first, next_, next_scales_);
    for (int64_t begin = 0; begin < item.heads; begin += together_) {
      int64_t end = std::min(begin + together_, item.heads);
      auto fetch_next = [&](int64_t most, int64_t shares) {
        bool is_next = end == item.heads;
        if (!is_next || next != nullptr) {
          SlotRange slots = is_next ? InSpan(*next, next_first) : InSpan(item, first);
          slots.end = std::min(slots.end, slots.begin / most * most + most);
          int64_t head = is_next ? 0 : end;
          FetchAhead(is_next, slots, head, std::min(together_, (is_next ? next : &item)->heads - head), shares);
        }
        if (p.decode || !is_next || next == &item) return;
        if (next != nullptr) ahead_.Add(0, RowsOfItem(p.q, *next, p.D), shares);
        if (!Self().WritesEarly()) ahead_.Add(1, RowsOfItem(p.o, item, p.V), shares);
      };
      ahead_ = {};
      Self().AttendHeads(begin, end, first, fetch_next);
      ahead_.FetchRest();
    }
    std::memcpy(slots_, next_, sizeof(slots_));
    if constexpr (kIsScaled) std::memcpy(scales_, next_scales_, sizeof(scales_));
  }
  if (item.spans != nullptr) {
    if (item.spans->left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    BeginSums(), AddSpans();
  }
  for (int64_t group = 0; group < groups_; ++group) Self().Write(group);
}

template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::LocateSpan(const Item& item, int64_t first, const Slot* (&slots)[kSpan],
                                                const float* (&scales)[kSpan]) const {
  const Slot* zeros = zeros_;
  Locate(p_, item, item.head, first, zeros, slots);
  if constexpr (kIsScaled) {
    const float* none = nullptr;
    LocateIn(p_.scales + 2 * item.head, 2 * p_.K, p_, item, first, none, scales);
  }
}

template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::BeginItem() {
  groups_ = (item_.heads + shared_ - 1) / shared_, blocks_ = (shared_ * head_rows_ + kSide - 1) / kSide;
  int64_t pairs = (blocks_ + 1) / 2, zeros = item_.heads * p_.Width();
  pairs_ = Scratch<BlockPair>(memory_[0], pairs), zeros_ = Scratch<Slot>(memory_[1], zeros);
  factors_ = Scratch<Factors>(memory_[2], blocks_);
  std::fill(zeros_, zeros_ + zeros, 0);
  int64_t row = 0, token = 0, g = 0;
  for (int64_t block = 0; block < 2 * pairs; ++block) {
    BlockPair& pair = pairs_[block / 2];
    BlockPair::Block seen{std::numeric_limits<int64_t>::max(), 0, 0, std::numeric_limits<int64_t>::max()};
    for (int64_t i = block % 2 * kSide, end = i + kSide; i < end; ++i) {
      int64_t position = item_.position + token, low = p_.window > 0 ? std::max<int64_t>(0, position + 1 - p_.window) : 0;
      int64_t high = Past(p_, item_.token + token, position);
      pair.low[i] = low, pair.high[i] = high;
      seen = {std::min(seen.begin, low), std::max(seen.end, high), std::max(seen.all_begin, low), std::min(seen.all_end, high)};
      if (row + 1 < head_rows_) {
        ++row;
        if (++g == p_.G) g = 0, ++token;
      } else if (shared_ > 1) {
        row = token = g = 0;
      }  // else, past the end, the last row again
    }
    pair.blocks[block % 2] = seen;
  }
  Self().Begin();
  for (int64_t group = 0; group < groups_; ++group) Self().PackQueries(group);
}

template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::BeginSums() {
  int64_t rows = groups_ * blocks_ * kSide;
  tops_ = Scratch<float>(memory_[3], rows), totals_ = Scratch<float>(memory_[4], rows);
  o_ = Scratch<float>(memory_[5], rows * p_.V);
  std::fill(tops_, tops_ + rows, kMasked), std::fill(totals_, totals_ + rows, 0.0f);
  if (p_.sinks == nullptr) return;
  std::fill(o_, o_ + rows * p_.V, 0.0f);
  for (int64_t i = 0; i < groups_ * blocks_; ++i) {
    EachRow(i / blocks_, i % blocks_, [&](int64_t row, int64_t place) {  // a score before any other
      tops_[i * kSide + row] = p_.sinks[place % p_.H], totals_[i * kSide + row] = 1.0f;
    });
  }
}

// Has so many heads, from `head` on, of these slots fetched in so many shares. is_next: they are those of next_.
template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::FetchAhead(bool is_next, const SlotRange& slots, int64_t head, int64_t heads, int64_t shares) {
  int64_t bytes = heads * p_.Width() * sizeof(Slot);
  const Slot* const* from = is_next ? next_ : slots_;
  int64_t lines = (slots.end - slots.begin) * bytes / kCacheLine;
  ahead_ = {from + slots.begin, from + slots.end, head * p_.Apart(), bytes, lines * Ahead<Slot>::kUnit / shares + 1};
  if constexpr (kIsScaled) {
    ahead_.scales = (is_next ? next_scales_ : scales_) + slots.begin, ahead_.scale_bytes = 2 * item_.heads * sizeof(float);
  }
}

// Scales scores, and bends them by the soft cap: cap * tanh(x / cap).
template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::CapScores(float* scores, int64_t begin, int64_t end) const {
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

template <typename Products, typename Slot>
Seen SpanAttention<Products, Slot>::SeenBy(const BlockPair& rows, int64_t half, int64_t first, int64_t begin, int64_t end) const {
  constexpr int64_t kStep = Products::kStep;
  const BlockPair::Block& block = rows.blocks[half];
  int64_t all_begin = std::clamp((block.all_begin - first + kStep - 1) / kStep * kStep, begin, end);
  int64_t all_end = std::clamp((block.all_end - first) / kStep * kStep, all_begin, end);
  int64_t any_begin = std::clamp(block.begin - first, begin, end), any_end = std::clamp(block.end - first, begin, end);
  __m512i low = _mm512_sub_epi32(_mm512_load_si512(rows.low + half * kSide), _mm512_set1_epi32(first));
  __m512i high = _mm512_sub_epi32(_mm512_load_si512(rows.high + half * kSide), _mm512_set1_epi32(first));
  return {begin, all_begin, all_end, end, any_begin, any_end, low, _mm512_sub_epi32(high, low)};
}

// Takes what a block has in a span.
template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::TakeTotals(int64_t group, int64_t block, Totals totals) {
  if (item_.spans == nullptr) {
    factors_[block] = AddTotals(group * blocks_ + block, totals);
    return;
  }
  for (int64_t i = 0; i < BlockRows(group, block); ++i) {
    float* sums = SpanSums(item_.span, group, block * kSide + i);
    sums[0] = totals.top[i], sums[1] = totals.total[i];
  }
}

// Adds what a span has of 32 dimensions to the sums of a block's row.
template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::AddSums(int64_t group, int64_t block, int64_t row, int64_t d, __m512 low, __m512 high) {
  if (item_.spans != nullptr) {
    float* to = SpanSums(item_.span, group, block * kSide + row) + kSumsBefore + d;
    _mm512_storeu_ps(to, low), _mm512_storeu_ps(to + kSide, high);
  } else {
    factors_[block].Add(row, Sums(group, block * kSide + row, d), low, high);
  }
}

// Adds the totals of a span to those of a block.
template <typename Products, typename Slot>
Factors SpanAttention<Products, Slot>::AddTotals(int64_t block, Totals span) {
  float *tops = tops_ + block * kSide, *totals = totals_ + block * kSide;
  __m512 top = _mm512_load_ps(tops), most = _mm512_max_ps(top, span.top);
  __m512 before = Exp<avx512::Lanes>(_mm512_sub_ps(top, most)), now = Exp<avx512::Lanes>(_mm512_sub_ps(span.top, most));
  __m512 total_before = _mm512_load_ps(totals);
  __m512 total = _mm512_fmadd_ps(total_before, before, _mm512_mul_ps(span.total, now));
  Factors factors;
  _mm512_store_ps(factors.before, before), _mm512_store_ps(factors.now, now);
  factors.seen = _mm512_cmp_ps_mask(span.total, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  factors.saw_before = _mm512_cmp_ps_mask(total_before, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  _mm512_mask_store_ps(tops, factors.seen, most), _mm512_mask_store_ps(totals, factors.seen, total);
  return factors;
}

// Adds up the spans that several threads have computed.
template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::AddSpans() {
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

template <typename Products, typename Slot>
void SpanAttention<Products, Slot>::Write(int64_t group) {
  for (int64_t block = 0; block < blocks_; ++block) {
    EachRow(group, block, [&](int64_t row, int64_t place) {
      bf16* to = p_.o + place * p_.V;
      __m512 inverse = _mm512_set1_ps(1.0f / totals_[(group * blocks_ + block) * kSide + row]);
      for (int64_t d = 0; d < p_.V; d += kPair) {
        const float* o = Sums(group, block * kSide + row, d);
        Products::Put(to + d, _mm512_mul_ps(_mm512_load_ps(o), inverse), _mm512_mul_ps(_mm512_load_ps(o + kSide), inverse));
      }
    });
  }
}

}  // namespace jpaged::amx
