// Paged attention over a pool of bf16 with AMX; see attend.h. Two slots of values are unpacked at a time.
//
// Decode reads memory in order. Scores are computed for 64 slots of several heads at a time, while the next 64 are fetched, keys
// and values: a span's values are in the L2 cache when its weights are known.
//
// With one or two query rows to a head, values are added up by f32 multiply-adds, with the bits of tiles: TDPBF16PS sums the even ones
// of 32 slots apart from the odd ones, one after another from zero on; both sums are added, and then to what the tile held.
// It rounds to the nearest, and takes and makes zeros for denormal numbers. Tiles need values to be unpacked in memory first, and
// loads of tiles wait for what is written: beside fetches that takes longer.
//
// Where heads share a block, a key that is infinite or NaN makes NaN of its query's other heads as well.
#include "attend.h"
#include "level.h"

namespace jpaged::amx {
namespace {

using avx512::Transpose;

constexpr int64_t kColumn = 4 * kSide;         // slots of four tiles
constexpr int64_t kTileSize = kSide * kDepth;  // bf16 in a tile
constexpr int64_t kFewRows = 2;                // query rows of a head, up to which values are added up without tiles

static_assert(kPair == kDepth && kSpan % kColumn == 0);

// The operand of a product in tiles, 16 rows each: bytes from one row to the next, and numbers from a tile to the next one of
// the same sum.
struct Operand {
  const bf16* rows;
  int64_t stride, step;
};

inline Operand Packed(const bf16* tiles) { return {tiles, kDepth * sizeof(bf16), kTileSize}; }

// The weights of slots from `begin` on, where Softmax puts them.
inline Operand Weights(const float* scores, int64_t begin) {
  return {reinterpret_cast<const bf16*>(scores + begin * kSide), kDepth * sizeof(bf16), 2 * kTileSize};
}

// sums[i][j] = a[i] . b[j], each along so many tiles. The operands a or b (streams_a) are loaded past the
// L1 cache, where they would take the place of what is used again. Calls `between` for each.
template <bool streams_a, typename Between>
void MultiplyPairs(const Operand& a0, const Operand& a1, const Operand& b0, const Operand& b1, int64_t tiles,
                   float* const (&sums)[2][2], const Between& between) {
  WriteBeforeTiles();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < tiles; ++i) {
    if constexpr (streams_a) {
      _tile_stream_loadd(4, a0.rows + i * a0.step, a0.stride);
      _tile_loadd(6, b0.rows + i * b0.step, 64);
      _tile_stream_loadd(5, a1.rows + i * a1.step, a1.stride);
      _tile_loadd(7, b1.rows + i * b1.step, 64);
    } else {
      _tile_loadd(4, a0.rows + i * a0.step, a0.stride);
      _tile_stream_loadd(6, b0.rows + i * b0.step, 64);
      _tile_loadd(5, a1.rows + i * a1.step, a1.stride);
      _tile_stream_loadd(7, b1.rows + i * b1.step, 64);
    }
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
void MultiplyUnpacked(const Operand& a, int64_t tiles, float* sums, const Unpack& unpack) {
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
    _tile_loadd(4, a.rows + i * a.step, a.stride);
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

// Returns 2^x to 8e-5 of it, and half a step of bf16 more: without its lower bits it is rounded to bf16. NaN of NaN; for x far
// below 0 it is 0.
inline __m512 PowerToCut(__m512 x) {
  __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(0.078023009f);
  for (float c : {0.22606939f, 0.69583285f, 0.99992526f + 0x1p-8f}) y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(y, x);
}

// Where the query rows of a pair of blocks have their results. They are brought into the L1 cache for what will be written, some at a
// time: a core that begins to write lines which another one has waits for them.
struct Results {
  bf16* rows[kPair];
  int64_t count = 0, share = 0;  // rows, and lines that are fetched at a time
  int64_t row = 0, d = 0;        // what is fetched next

  void Fetch(int64_t V) {
    for (int64_t i = 0; i < share && row < count; ++i) {
      __builtin_prefetch(rows[row] + d, 1, 3);
      if ((d += kDepth) >= V) d = 0, ++row;
    }
  }
};

// What weights become: floats of each slot, or bf16 as tiles, [16 rows][32 slots] or [16 pairs of slots][16 rows][2].
enum class WeightForm { kFloats, kRows, kPairs };

class Bf16Products : public SpanAttention<Bf16Products, bf16> {
 public:
  static constexpr int64_t kStep = kDepth, kMostShared = kSide;

  void Begin();
  void PackQueries(int64_t group);
  int64_t Shares(int64_t heads) const { return SharesOfScores(heads) + SharesOfValues(heads); }
  int64_t TogetherBytes() const { return IsByColumns() ? 2 * kAheadBytes : kAheadBytes; }
  template <typename FetchNext>
  void AttendHeads(int64_t begin, int64_t end, int64_t first, const FetchNext& fetch_next);
  void AttendSpan(int64_t group, int64_t first);
  bool WritesEarly() const { return transposes_values_; }
  void Write(int64_t group) {
    if (!WritesEarly()) SpanAttention::Write(group);
  }
  static void Put(bf16* to, __m512 low, __m512 high) { avx512::PutUnpacked(to, low, high); }

 private:
  // Whether scores are computed for some slots of all heads that are at work together, and not head by head.
  bool IsByColumns() const { return p_.decode && !p_.latent && head_rows_ <= kSide; }
  int64_t SharesOfScores(int64_t heads) const { return heads * ((blocks_ + 1) / 2) * p_.D / kDepth * 2; }
  int64_t SharesOfValues(int64_t heads) const {
    int64_t softmaxes = (heads + shared_ - 1) / shared_ * blocks_ * 4;
    return heads * p_.V / kPair * (blocks_ == 1 ? 4 : 1 + 2 * ((blocks_ + 1) / 2)) + softmaxes;
  }
  void PackKeys(int64_t head, const SlotRange& slots, int64_t begin, int64_t end);
  void PackValues(int64_t head, int64_t begin, int64_t end);
  void AttendPairs(int64_t head, int64_t first);
  void ScorePair(int64_t head, int64_t pair, int64_t begin, int64_t end);
  void ScoreColumn(int64_t group, int64_t block, int64_t column, float* scores);
  template <WeightForm form>
  Totals Softmax(const Seen& seen, float* scores);
  void WeighPair(int64_t head, int64_t pair, int64_t begin, int64_t end, bool is_last);
  void WeighOnly(int64_t group, int64_t first, float* scores);
  template <int N>
  void WeighAlone(int64_t head, int64_t d, const float* scores, int64_t begin, int64_t end);
  void AddWeighed(int64_t head, int64_t block, int64_t d, const float* sums);
  void AddTransposed(int64_t head, int64_t block, int64_t d, const float* sums);
  void WriteTransposed(int64_t head, int64_t block, int64_t d, const float* sums, bf16* const* to);
  template <int kRows>
  void WeighFew(int64_t head, const float* weights, int64_t begin, int64_t end);
  template <int kRows, int N>
  void SumFew(int64_t head, int64_t d, const float* weights, int64_t begin, int64_t end);
  template <int kRows, int N>
  void SumValues(int64_t offset, const float* weights, int64_t begin, int64_t end, float (*sums)[N][kSide]);

  Operand key_tiles_[kSide][kSpan / kSide];  // of a group's heads
  bf16* q_;                                  // [groups][shared heads][blocks][D / 2][16 rows][2]
  bf16* keys_;     // [shared heads][kSpan / 16][D / 32][16 slots][32], those that are not used as they lie
  bf16* values_;   // [V / 32][2][kSpan / 32] tiles: [16 pairs of slots][16 dimensions][2], of 32 dimensions those that unpacking puts
                   // first first; or transposed, [16 dimensions][32 slots]
  // Whether values are transposed, once for all query rows, and not the weights of each block.
  bool transposes_values_;
  Results results_;  // of the pair at work, if they are known at the end of this span
  float* scores_;  // [2, or groups that are at work together][kSpan][16 rows]; then weights, see Softmax
  Memory memory_[4];
};

void Bf16Products::Begin() {
  // A step's values of 32 dimensions take as long as the weights of a pair of blocks.
  transposes_values_ = blocks_ > p_.V / kSide && item_.spans == nullptr;
  q_ = Scratch<bf16>(memory_[0], (groups_ * shared_ * blocks_ + 1) * kSide * p_.D);  // the last block may be read as one of a pair
  keys_ = Scratch<bf16>(memory_[1], shared_ * kSpan * p_.D), values_ = Scratch<bf16>(memory_[2], kSpan * p_.V);
  scores_ = Scratch<float>(memory_[3], std::max<int64_t>(2, together_ / shared_) * kSpan * kSide);
}

// Packs the query rows of a group's heads, each head's with zeros in the rows of others.
void Bf16Products::PackQueries(int64_t group) {
  for (int64_t block = 0; block < blocks_; ++block) {
    const bf16* from[kSide];
    std::fill(from, from + kSide, zeros_);
    EachRow(group, block, [&](int64_t row, int64_t place) { from[row] = p_.q + place * p_.D; });
    for (int64_t d = 0; d < p_.D; d += kDepth) {
      __m512i rows[kSide];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSide; ++i) rows[i] = _mm512_loadu_si512(from[i] + d);
      bf16* packed = q_ + (group * shared_ * blocks_ + block) * kSide * p_.D + d * kSide;
      StoreOfHeads(group, block, rows, packed, blocks_ * kSide * p_.D);
    }
  }
}

template <typename FetchNext>
void Bf16Products::AttendHeads(int64_t begin, int64_t end, int64_t first, const FetchNext& fetch_next) {
  if (!IsByColumns()) return SpanAttention::AttendHeads(begin, end, first, fetch_next);
  SlotRange slots = InSpan(item_, first);
  int64_t heads = end - begin, group = begin / shared_, groups = (heads + shared_ - 1) / shared_;
  int64_t shares = kColumn / kDepth * SharesOfScores(heads);  // of a column
  for (int64_t column = slots.begin / kColumn * kColumn, past; column < slots.end; column = past) {
    past = column + kColumn;
    bool is_last = past >= slots.end;
    if (is_last) {
      fetch_next(kColumn, shares + SharesOfValues(heads) * StepsOf(slots));
    } else {
      FetchAhead(false, {past, std::min(past + kColumn, slots.end)}, begin, heads, shares);
    }
    for (int64_t i = 0; i < groups; ++i) {
      int64_t head = (group + i) * shared_;
      for (int64_t h = head; h < head + GroupHeads(group + i); ++h) PackKeys(h, slots, column / kSide, past / kSide);
      ScoreColumn(group + i, 0, column, scores_ + i * kSpan * kSide);
    }
    if (!is_last) ahead_.FetchRest();
  }
  for (int64_t i = 0; i < groups; ++i) WeighOnly(group + i, first, scores_ + i * kSpan * kSide);
}

void Bf16Products::AttendSpan(int64_t group, int64_t first) {
  SlotRange slots = InSpan(item_, first);
  int64_t begin = slots.begin, end = slots.end, head = group * shared_, last = head + GroupHeads(group);
  for (int64_t h = head; h < last; ++h) PackKeys(h, slots, begin / kColumn * kColumn / kSide, (end + kColumn - 1) / kColumn * kColumn / kSide);
  if (blocks_ > 1) return AttendPairs(group, first);
  for (int64_t column = begin / kColumn * kColumn; column < end; column += kColumn) ScoreColumn(group, 0, column, scores_);
  WeighOnly(group, first, scores_);
}

// Attends a span by pairs of blocks, one after the other: scores, and the weights in their place, of a pair stay in the L1 cache.
void Bf16Products::AttendPairs(int64_t head, int64_t first) {
  SlotRange slots = InSpan(item_, first);
  PackValues(head, slots.begin / kDepth * kDepth, (slots.end + kDepth - 1) / kDepth * kDepth);
  EachPair(first, [&](int64_t pair, int64_t begin, int64_t end) {
    int64_t blocks = 1 + HasSecond(pair);
    bool is_last = transposes_values_ && pairs_[pair / 2].End() <= first + kSpan;
    results_.count = 0;
    for (int64_t half = 0; is_last && half < blocks; ++half) {
      EachRow(head, pair + half, [&](int64_t, int64_t place) { results_.rows[results_.count++] = p_.o + place * p_.V; });
    }
    int64_t steps = blocks * (end - begin) / kDepth;
    results_.share = (results_.count * p_.V / kDepth + steps - 1) / steps, results_.row = results_.d = 0;
    ScorePair(head, pair, begin, end);
    for (int64_t half = 0; half < blocks; ++half) {
      Seen seen = SeenBy(pairs_[pair / 2], half, first, begin, end);
      float* scores = scores_ + half * kSpan * kSide;
      Totals totals = transposes_values_ ? Softmax<WeightForm::kPairs>(seen, scores) : Softmax<WeightForm::kRows>(seen, scores);
      TakeTotals(head, pair + half, totals);
    }
    WeighPair(head, pair, begin, end, is_last);
  });
}

// Copies keys of tiles [begin, end) of a span whose slots are not in one block of the pool, and all where several products read
// them. Others are read as they lie, also where some of their slots are not seen: whatever is there, their scores are not used.
void Bf16Products::PackKeys(int64_t head, const SlotRange& slots, int64_t begin, int64_t end) {
  int64_t offset = head * p_.Apart(), in_group = head % shared_;
  for (int64_t tile = begin; tile < end; ++tile) {
    int64_t first = tile * kSide, seen = std::max(first, slots.begin);
    if (p_.P % kSide == 0 && blocks_ <= 2) {
      bool is_seen = seen < std::min(first + kSide, slots.end);
      const bf16* keys = is_seen ? slots_[seen] - (seen - first) * p_.Stride() + offset : zeros_;
      key_tiles_[in_group][tile] = {keys, is_seen ? p_.Stride() * int64_t{sizeof(bf16)} : 0, kDepth};
      continue;
    }
    bf16* to = keys_ + (in_group * kSpan + tile * kSide) * p_.D;
    key_tiles_[in_group][tile] = Packed(to);
    for (int64_t slot = 0; slot < kSide; ++slot, to += kDepth) {
      for (int64_t d = 0; d < p_.D; d += kDepth) {
        _mm512_store_si512(to + d * kSide, _mm512_loadu_si512(slots_[first + slot] + offset + d));
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

// Transposes 32 dimensions of the values of 32 slots. tiles: [16 dimensions][32 slots], and those of the other 16 dimensions, so
// far apart. Lines of slots may lie in the same few places of the L1 cache, so they are read once.
inline void TransposeValues(const bf16* const* slots, int64_t offset, bf16* tiles, int64_t apart) {
  alignas(64) bf16 unpacked[2][kTileSize];
  UnpackValues(slots, offset, unpacked[0], unpacked[1], [] {});
  for (int64_t half = 0; half < 2; ++half) {
    __m512i pairs[kSide];  // of slots; a lane of 128 bits has four of its eight dimensions
#pragma GCC unroll 16
    for (int64_t i = 0; i < kSide; ++i) pairs[i] = _mm512_load_si512(unpacked[half] + i * kDepth);
    Transpose(pairs, [&](int64_t i, __m512i of_dimension) {
      int64_t d = i / 4 * 8 + half * 4 + i % 4;
      _mm512_store_si512(tiles + d / kSide * apart + d % kSide * kDepth, of_dimension);
    });
  }
}

// Unpacks the values of these slots, whole 32, or transposes them.
void Bf16Products::PackValues(int64_t head, int64_t begin, int64_t end) {
  int64_t offset = head * p_.Apart() + p_.ValueAt();
  for (int64_t slot = begin; slot < end; slot += kDepth) {
    for (int64_t d = 0; d < p_.V; d += kPair) {
      bf16* low = values_ + d * kSpan + slot * kSide;
      if (transposes_values_) {
        TransposeValues(slots_ + slot, offset + d, low, kSpan * kSide);
      } else {
        UnpackValues(slots_ + slot, offset + d, low, low + kSpan * kSide, [] {});
      }
      ahead_.Fetch(1);
    }
  }
}

// The products of a pair of blocks with the keys of slots [begin, end). The last pair may be one block: then the second one's are not
// used.
void Bf16Products::ScorePair(int64_t head, int64_t pair, int64_t begin, int64_t end) {
  const bf16* q = q_ + (head * blocks_ + pair) * kSide * p_.D;
  for (int64_t slot = begin; slot < end; slot += kPair) {
    const Operand* keys = key_tiles_[0] + slot / kSide;
    float *left = scores_ + slot * kSide, *right = left + kSpan * kSide;
    MultiplyPairs<true>(keys[0], keys[1], Packed(q), Packed(q + kSide * p_.D), p_.D / kDepth,
                        {{left, right}, {left + kSide * kSide, right + kSide * kSide}}, [&] { ahead_.Fetch(2); });
  }
}

// The products of one block with the keys of four tiles of slots. scores: [kSpan][16 rows].
void Bf16Products::ScoreColumn(int64_t group, int64_t block, int64_t column, float* scores) {
  const bf16* q = q_ + (group * shared_ * blocks_ + block) * kSide * p_.D;
  MultiplyColumn(key_tiles_[0] + column / kSide, GroupHeads(group), q, p_.D / kDepth, scores + column * kSide,
                 [&] { ahead_.Fetch(1); });
}

// Makes weights, relative to a row's largest score, of the scores of slots; 0 where a row does not see the slot. They are rounded to
// bf16, and take the place of scores, tiles the first half of the place of their slots. So what a pair of blocks has of a span,
// 32 KiB, stays in the L1 cache.
template <WeightForm form>
Totals Bf16Products::Softmax(const Seen& seen, float* scores) {
  if (p_.soft_cap > 0) CapScores(scores, seen.begin, seen.end);
  float scale = p_.soft_cap > 0 ? 1.0f : p_.scale;
  __m512 top = _mm512_mul_ps(Largest(seen, scores), _mm512_set1_ps(scale));
  const __m512 factor = _mm512_set1_ps(scale * kLog2E), base = _mm512_mul_ps(top, _mm512_set1_ps(kLog2E));
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
  auto weight = [&](int64_t slot) { return PowerToCut(_mm512_fmsub_ps(_mm512_load_ps(scores + slot * kSide), factor, base)); };
  auto masked = [&](int64_t slot) { return _mm512_maskz_mov_ps(seen(slot), weight(slot)); };
  auto store = [&](int64_t slot, __m512i words) { _mm512_store_si512(scores + slot * kSide, words); };
  // Takes the weights of two slots, cuts them off, and returns them in pairs. Sums are those of rounded weights.
  auto take = [&](int64_t slot, __m512 x, __m512 y) {
    __m512i bits = _mm512_castps_si512(x), next = _mm512_castps_si512(y);
    __m512i first = _mm512_and_si512(bits, upper), second = _mm512_and_si512(next, upper);
    even = _mm512_add_ps(even, _mm512_castsi512_ps(first)), odd = _mm512_add_ps(odd, _mm512_castsi512_ps(second));
    if constexpr (form == WeightForm::kFloats) store(slot, first), store(slot + 1, second);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(bits, 16), next);
  };
  for (int64_t slot = seen.begin; slot < seen.end; slot += kDepth) {
    __m512i pairs[kSide];
    auto put = [&](int64_t i, __m512 x, __m512 y) {
      __m512i words = take(slot + 2 * i, x, y);
      if constexpr (form == WeightForm::kRows) pairs[i] = words;
      if constexpr (form == WeightForm::kPairs) store(slot + i, words);  // scores of this place have been taken
    };
    if (slot >= seen.all_begin && slot < seen.all_end) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < kSide; ++i) {
        put(i, weight(slot + 2 * i), weight(slot + 2 * i + 1));
        if (i % 4 == 3) ahead_.Fetch(1);
      }
    } else {
#pragma GCC unroll 4
      for (int64_t i = 0; i < kSide; i += 4) {
        bool is_seen = slot + 2 * i < seen.any_end && slot + 2 * i + 8 > seen.any_begin;
#pragma GCC unroll 4
        for (int64_t pair = i; pair < i + 4; ++pair) {
          if (is_seen) {
            put(pair, masked(slot + 2 * pair), masked(slot + 2 * pair + 1));
          } else {
            put(pair, _mm512_setzero_ps(), _mm512_setzero_ps());
          }
        }
      }
      ahead_.Fetch(4);
    }
    if constexpr (form == WeightForm::kRows) Transpose(pairs, [&](int64_t row, __m512i of_row) { store(slot + row, of_row); });
    if constexpr (form == WeightForm::kPairs) results_.Fetch(p_.V);
  }
  return {top, _mm512_add_ps(even, odd)};
}

// Adds up the values of slots [begin, end) by the weights of a pair of blocks. is_last: their results are written.
void Bf16Products::WeighPair(int64_t head, int64_t pair, int64_t begin, int64_t end, bool is_last) {
  Operand first = Weights(scores_, begin), second = Weights(scores_ + kSpan * kSide, begin);
  int64_t tiles = (end - begin) / kDepth;
  auto fetch = [&] { ahead_.Fetch(2); };
  for (int64_t d = 0; d < p_.V; d += kPair) {
    // Of a block: those of low and of high dimensions, [2][16 rows][16], or transposed, [32][16 rows].
    alignas(64) float sums[2][2][kSide][kSide];
    float *low_sums[2] = {sums[0][0][0], sums[1][0][0]}, *high_sums[2] = {sums[0][1][0], sums[1][1][0]};
    const bf16* values = values_ + d * kSpan + begin * kSide;
    Operand low = Packed(values), high = Packed(values + kSpan * kSide);
    if (transposes_values_) {
      MultiplyPairs<true>(low, high, first, second, tiles, {{low_sums[0], low_sums[1]}, {high_sums[0], high_sums[1]}}, fetch);
    } else {
      MultiplyPairs<false>(first, second, low, high, tiles, {{low_sums[0], high_sums[0]}, {low_sums[1], high_sums[1]}}, fetch);
    }
    for (int64_t half = 0; half < 1 + HasSecond(pair); ++half) {
      if (!transposes_values_) {
        AddWeighed(head, pair + half, d, low_sums[half]);
      } else if (is_last) {
        WriteTransposed(head, pair + half, d, low_sums[half], results_.rows + half * kSide);
      } else {
        AddTransposed(head, pair + half, d, low_sums[half]);
      }
    }
  }
}

// Makes the weights of a group's only block of its scores, and adds up the values of its heads by them.
void Bf16Products::WeighOnly(int64_t group, int64_t first, float* scores) {
  EachPair(first, [&](int64_t block, int64_t begin, int64_t end) {
    Seen seen = SeenBy(pairs_[0], 0, first, begin, end);
    bool is_few = head_rows_ <= kFewRows;
    TakeTotals(group, block, is_few ? Softmax<WeightForm::kFloats>(seen, scores) : Softmax<WeightForm::kRows>(seen, scores));
    for (int64_t head = group * shared_, last = head + GroupHeads(group); head < last; ++head) {
      if (is_few) {
        auto weigh = head_rows_ == 1 ? &Bf16Products::WeighFew<1> : &Bf16Products::WeighFew<2>;
        (this->*weigh)(head, scores, begin, end);
        continue;
      }
      int64_t d = 0;
      for (; d + 2 * kPair <= p_.V; d += 2 * kPair) WeighAlone<4>(head, d, scores, begin, end);
      if (d < p_.V) WeighAlone<2>(head, d, scores, begin, end);
    }
  });
}

// Adds up the values of slots [begin, end) by the weights of the only block, 16 N dimensions. Values are unpacked right before
// their product.
template <int N>
void Bf16Products::WeighAlone(int64_t head, int64_t d, const float* scores, int64_t begin, int64_t end) {
  alignas(64) float sums[N][kSide][kSide];
  int64_t offset = head * p_.Apart() + p_.ValueAt() + d;
  MultiplyUnpacked<N>(Weights(scores, begin), (end - begin) / kDepth, sums[0][0], [&](int64_t tile, bf16* to) {
    for (int64_t i = 0; i < N; i += 2, to += 2 * kTileSize) {
      UnpackValues(slots_ + begin + tile * kDepth, offset + i * kSide, to, to + kTileSize, [&] { ahead_.Fetch(1); });
    }
  });
  for (int64_t i = 0; i < N; i += 2) AddWeighed(head, 0, d + i * kSide, sums[i][0]);
}

// Adds what a span has of 32 dimensions to the sums of the block's rows that are this head's. sums: [2][16 rows][16].
void Bf16Products::AddWeighed(int64_t head, int64_t block, int64_t d, const float* sums) {
  if (head_rows_ > kSide && item_.spans == nullptr) return factors_[block].AddBlock(Sums(head, block * kSide, d), sums);
  int64_t row, end;
  RowsOf(head, block, &row, &end);
  for (sums += row * kSide; row < end; ++row, sums += kSide) {
    AddSums(GroupOf(head), block, row, d, _mm512_load_ps(sums), _mm512_load_ps(sums + kSide * kSide));
  }
}

// Calls body(sum_of), where sum_of(sum, until_now) is what all rows of a block have of a dimension, with a span and those before it.
template <typename Body>
void WithSpan(const Factors& factors, const Body& body) {
  const __m512 before = _mm512_load_ps(factors.before), now = _mm512_load_ps(factors.now), zero = _mm512_setzero_ps();
  bool is_first = factors.saw_before == 0 && factors.seen == 0xffff;
  if (is_first && _mm512_cmp_ps_mask(now, _mm512_set1_ps(1.0f), _CMP_EQ_OQ) == 0xffff) {
    // What is added makes 0 of -0, as multiplying and adding does below.
    return body([&](const float* sum, const float*) { return _mm512_add_ps(_mm512_load_ps(sum), zero); });
  }
  body([&](const float* sum, const float* until_now) {
    __m512 old = _mm512_maskz_load_ps(factors.saw_before, until_now);
    return _mm512_mask_mov_ps(old, factors.seen, _mm512_fmadd_ps(old, before, _mm512_mul_ps(_mm512_load_ps(sum), now)));
  });
}

// Adds what a span has of 32 dimensions to the transposed sums of a block, [V][16 rows]. sums: [32][16 rows].
void Bf16Products::AddTransposed(int64_t head, int64_t block, int64_t d, const float* sums) {
  float* o = Sums(head, block * kSide, d);
  WithSpan(factors_[block], [&](const auto& sum_of) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < kPair * kSide; i += kSide) _mm512_store_ps(o + i, sum_of(sums + i, o + i));
  });
}

// Writes these dimensions of a block's results, of which the last span's sums are these, to where those of each row begin.
void Bf16Products::WriteTransposed(int64_t head, int64_t block, int64_t d, const float* sums, bf16* const* to) {
  const float* o = Sums(head, block * kSide, d);
  const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(totals_ + (head * blocks_ + block) * kSide));
  const __m512i row = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i in_turn = _mm512_or_si512(row, _mm512_slli_epi32(_mm512_add_epi32(row, _mm512_set1_epi32(kSide)), 16));
  __m512i pairs[kSide];  // of dimensions
  WithSpan(factors_[block], [&](const auto& sum_of) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < kSide; ++i) {
      const float *sum = sums + i * kPair, *until_now = o + i * kPair;
      __m512 first = _mm512_mul_ps(sum_of(sum, until_now), inverse);
      __m512 second = _mm512_mul_ps(sum_of(sum + kSide, until_now + kSide), inverse);
      pairs[i] = _mm512_permutexvar_epi16(in_turn, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
  });
  int64_t rows = BlockRows(head, block);
  Transpose(pairs, [&](int64_t row, __m512i of_row) {
    if (row < rows) _mm512_storeu_si512(to[row] + d, of_row);
  });
}

// Adds up the values of slots [begin, end) for the few rows of a head, by weights in f32: [kSpan][16 rows].
template <int kRows>
void Bf16Products::WeighFew(int64_t head, const float* weights, int64_t begin, int64_t end) {
  constexpr int kParts = 8 / kRows;  // registers of 16 dimensions, of which a row has three each
  int64_t d = 0;
  for (; d + kParts * kSide <= p_.V; d += kParts * kSide) SumFew<kRows, kParts>(head, d, weights, begin, end);
  for (; d < p_.V; d += kPair) SumFew<kRows, 2>(head, d, weights, begin, end);
}

// The same of 16 N dimensions.
template <int kRows, int N>
void Bf16Products::SumFew(int64_t head, int64_t d, const float* weights, int64_t begin, int64_t end) {
  alignas(64) float sums[kRows][N][kSide];
  int64_t row, past;
  RowsOf(head, 0, &row, &past);
  {
    FlushDenormals in_this_thread;
    SumValues<kRows, N>(head * p_.Apart() + p_.ValueAt() + d, weights + row, begin, end, sums);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < N; i += 2) {
      AddSums(GroupOf(head), 0, row + r, d + i * kSide, _mm512_load_ps(sums[r][i]), _mm512_load_ps(sums[r][i + 1]));
    }
  }
}

// sums[r] = the values of slots [begin, end), from `offset` on in a slot, times the weights of row r: 16 N dimensions, in the order
// in which unpacking puts them.
template <int kRows, int N>
[[gnu::noinline]] void Bf16Products::SumValues(int64_t offset, const float* weights, int64_t begin, int64_t end,
                                               float (*sums)[N][kSide]) {
  __m512 totals[kRows][N];
#pragma GCC unroll 8
  for (int i = 0; i < kRows * N; ++i) totals[i / N][i % N] = _mm512_setzero_ps();
  for (int64_t tile = begin; tile < end; tile += kDepth) {
    __m512 even[kRows][N], odd[kRows][N];
#pragma GCC unroll 8
    for (int i = 0; i < kRows * N; ++i) even[i / N][i % N] = odd[i / N][i % N] = _mm512_setzero_ps();
    auto add = [&](__m512 (&to)[kRows][N], int64_t slot) {
      const bf16* value = slots_[slot] + offset;
      __m512 weight[kRows];
#pragma GCC unroll 2
      for (int r = 0; r < kRows; ++r) weight[r] = _mm512_set1_ps(weights[slot * kSide + r]);
#pragma GCC unroll 4
      for (int i = 0; i < N; i += 2) {
        __m512i x = _mm512_loadu_si512(value + i * kSide);
        __m512 low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(_mm512_setzero_si512(), x));
        __m512 high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(_mm512_setzero_si512(), x));
#pragma GCC unroll 2
        for (int r = 0; r < kRows; ++r) {
          to[r][i] = _mm512_fmadd_ps(weight[r], low, to[r][i]), to[r][i + 1] = _mm512_fmadd_ps(weight[r], high, to[r][i + 1]);
        }
      }
    };
    for (int64_t part = tile; part < tile + kDepth; part += 8, ahead_.Fetch(N / 2)) {
#pragma GCC unroll 4
      for (int64_t slot = part; slot < part + 8; slot += 2) add(even, slot), add(odd, slot + 1);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows * N; ++i) {
      __m512& total = totals[i / N][i % N];
      total = _mm512_add_ps(total, _mm512_add_ps(even[i / N][i % N], odd[i / N][i % N]));
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows * N; ++i) _mm512_store_ps(sums[i / N][i % N], totals[i / N][i % N]);
}

}  // namespace

void Attend(const Problem& p, const Item& item, const Item* after) {
  Tiles tiles_of_this_thread;
  ThreadLocal<Bf16Products>().Attend(p, item, after);
}

}  // namespace jpaged::amx
