// Paged attention over a pool of int8 with AMX, in integers; see attend.h. Not of latents.
//
// The arithmetic is that of int8_tiles.h: queries become words in steps of a power of two, and weights, times the scales of
// values, words in steps of a 32767th of the largest that a query has, here in a span. Tiles multiply bytes, so a word is two
// planes of them: its upper byte, which has the sign, and its lower one, which has none. Sums of both are exact in 32 bits, and so
// are 256 times the first plus the second: of keys as int8_tiles.h says, of a span of values below 2^15 * 2^7 * 256 = 2^30.
//
// Keys are used as they lie, 64 dimensions in a row of a tile: past the end of a key begins its value, which the zeros of a query
// meet. Values of four slots are put side by side, and weights, which are made slot by slot, are transposed. Where there are many
// blocks of query rows values are transposed instead, once for all of them.
#include <limits>
#include <tuple>
#include <utility>

#include "attend.h"
#include "level.h"

namespace jpaged::amx {
namespace {

using avx512::Transpose;

constexpr int64_t kBytes = 64;                // of a tile's row: dimensions of a key, or slots
constexpr int64_t kTileBytes = kSide * kBytes;
constexpr int64_t kPlanes = 2;                // of a word
constexpr int64_t kWholeD = 512;              // dimensions of a key whose products with 16 bits of a query cannot overflow
constexpr float kMostSteps = 32767.0f;        // of a weight

// 16 keys: where the first begins, and bytes from one to the next.
struct Keys {
  const int8_t* first;
  int64_t stride;
};

// Tiles 0 and 1 (is_odd: 2 and 3) = the products of 16 keys a[head] and of both planes of q[head], of all heads. a: [heads]
// [kSpan / 16]. is_first: tiles 6 and 7 do not hold these queries yet, as they do after a call if the queries are one tile a plane.
// Calls `fetch` for each product of tiles.
template <bool is_odd, typename Fetch>
inline void MultiplyKeys(const Keys* a, int64_t heads, const int8_t* q, int64_t tiles, bool is_first, const Fetch& fetch) {
  if constexpr (is_odd) {
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_zero(0);
    _tile_zero(1);
  }
  is_first |= heads * tiles > 1;
  for (int64_t head = 0; head < heads; ++head, a += kSpan / kSide) {
    for (int64_t i = 0; i < tiles; ++i, q += kPlanes * kTileBytes) {
      if (is_first) {
        _tile_loadd(6, q, kBytes);
        _tile_loadd(7, q + kTileBytes, kBytes);
      }
      if constexpr (is_odd) {
        _tile_loadd(5, a->first + i * kBytes, a->stride);
        _tile_dpbssd(2, 5, 6);
        fetch();
        _tile_dpbsud(3, 5, 7);
        fetch();
      } else {
        _tile_loadd(4, a->first + i * kBytes, a->stride);
        _tile_dpbssd(0, 4, 6);
        fetch();
        _tile_dpbsud(1, 4, 7);
        fetch();
      }
    }
  }
}

// sums[plane][i] = weights[plane] . v[i] (is_transposed: v[i] . weights[plane]), along so many tiles; i: one of two groups of 16
// dimensions. weights: [2][tiles of a span], v: [4][tiles of a span].
template <bool is_transposed, typename Fetch, typename Between>
void MultiplyValues(const int8_t* weights, const int8_t* v, int64_t tiles, int32_t* sums, const Fetch& fetch,
                    const Between& between) {
  constexpr int64_t kOther = kSpan / kBytes * kTileBytes;  // bytes to the other plane or dimensions
  WriteBeforeTiles();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < tiles; ++i, weights += kTileBytes, v += kTileBytes) {
    _tile_loadd(4, weights, kBytes);
    _tile_loadd(5, weights + kOther, kBytes);
    _tile_loadd(6, v, kBytes);
    _tile_loadd(7, v + kOther, kBytes);
    if constexpr (is_transposed) {
      _tile_dpbssd(0, 6, 4);
      fetch();
      _tile_dpbsud(2, 6, 5);
      fetch();
      _tile_dpbssd(1, 7, 4);
      fetch();
      _tile_dpbsud(3, 7, 5);
    } else {
      _tile_dpbssd(0, 4, 6);
      fetch();
      _tile_dpbusd(2, 5, 6);
      fetch();
      _tile_dpbssd(1, 4, 7);
      fetch();
      _tile_dpbusd(3, 5, 7);
    }
    fetch(), between();
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSide * kSide, 64);
  _tile_stored(2, sums + kPlanes * 2 * kSide * kSide, 64);
  _tile_stored(3, sums + (kPlanes * 2 + 1) * kSide * kSide, 64);
}

// The slots [begin, end) in whole tiles of weights.
inline int64_t TileBegin(int64_t begin) { return begin / kBytes * kBytes; }
inline int64_t TileEnd(int64_t end) { return (end + kBytes - 1) / kBytes * kBytes; }

// Returns 16 sums of words, of the sums of their planes, which lie so far apart.
inline __m512 SumsOfWords(const int32_t* upper, int64_t apart) {
  __m512i sums = _mm512_slli_epi32(_mm512_load_si512(upper), 8);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_load_si512(upper + apart)));
}

// Returns the larger absolute value; of a number and NaN it is the number.
inline __m512 LargerSize(__m512 x, __m512 y) {
  constexpr int kMaximum = 3, kPositive = 2 << 2;
  return _mm512_range_ps(x, y, kMaximum | kPositive);
}

// Returns the largest absolute value of whole 32 numbers; NaN if there is one.
inline float LargestOf(const bf16* x, int64_t count) {
  __m512i most = _mm512_setzero_si512();  // bits without a sign are in the order of numbers, NaN the largest
  for (int64_t i = 0; i < count; i += kDepth) {
    most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi16(0x7fff)));
  }
  __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
  return FromBf16(_mm512_reduce_max_epu32(_mm512_cvtepu16_epi32(half)));
}

class Int8Products : public SpanAttention<Int8Products, int8_t> {
 public:
  static constexpr int64_t kStep = kPair, kMostShared = 8;  // heads whose scales of a slot fill a register

  void Begin();
  void PackQueries(int64_t group);
  int64_t Shares(int64_t heads) const {
    int64_t groups = (heads + shared_ - 1) / shared_;
    return heads * (blocks_ * DTiles() * 8 + VTiles() * (blocks_ * 4 + 8)) + groups * blocks_ * 24;
  }
  void AttendSpan(int64_t group, int64_t first);
  bool WritesEarly() const { return false; }
  void Write(int64_t group);
  static void Put(bf16* to, __m512 low, __m512 high) { avx512::PutRounded(to, low), avx512::PutRounded(to + kSide, high); }

 private:
  std::pair<float, float> StepOf(const bf16* q) const;
  void PackKeys(int64_t head, int64_t begin, int64_t end);
  void BeginValues(int64_t head, int64_t d, int64_t begin, int64_t end, int8_t* to);
  void PackValues(int64_t slots);
  void TransposeValues(int8_t* values, int64_t begin, int64_t end) const;
  void GatherScales(int64_t group, int64_t begin, int64_t end);
  template <bool is_shared>
  __m512 Score(int64_t group, int64_t block, const Seen& seen);
  template <bool is_shared>
  Totals Softmax(int64_t group, int64_t block, const Seen& seen, __m512 largest_score);
  template <bool is_shared>
  void TakeScores(int64_t group, int64_t block, const Seen& seen) {
    TakeTotals(group, block, Softmax<is_shared>(group, block, seen, Score<is_shared>(group, block, seen)));
  }
  void StoreWeights(__m512i (&weights)[kSide], int8_t* to) const;
  void Weigh(int64_t head, int64_t block, int64_t d, int64_t begin, int64_t end, const int8_t* values);
  void AddTransposed(int64_t group, int64_t block, int64_t d, const int32_t* sums);

  int64_t DTiles() const { return (p_.D + kBytes - 1) / kBytes; }
  int64_t VTiles() const { return (p_.V + kBytes - 1) / kBytes; }
  // Of the scales of a slot of a group, [heads][2], those of each row's head: of keys (0) or of values (1).
  __m512i OrderOfScales(int64_t part) const;
  template <bool is_shared>
  __m512 Scales(int64_t slot, int64_t part, __m512i order) const {
    if constexpr (is_shared) return _mm512_permutexvar_ps(order, _mm512_load_ps(scales_of_ + slot * kSide));
    return _mm512_set1_ps(scales_of_[part * kSpan + slot]);
  }

  // Whether values are transposed, not the weights of many blocks. Then so are the sums of a block, [V][16 rows].
  bool transposes_values_;
  Keys key_tiles_[kMostShared][kSpan / kSide];  // of a group's heads
  float steps_of_power_;                        // of the power of two that a query's largest number is at least
  int8_t* q_;                     // [groups][shared heads][blocks][D / 64][2 planes][16 of 4 dimensions][16 rows][4]
  float* q_steps_;                // [groups][blocks][16 rows]
  int8_t* keys_;                  // [shared heads][kSpan / 16][D / 64][16 slots][64], those that are not used as they lie
  int8_t* values_;                // [2][4][kSpan / 64][16 of 4 slots][16 dimensions][4]; transposed [16 dimensions][64 slots]
  int8_t* weights_;               // [blocks][2 planes][kSpan / 64][16 rows][64 slots]; else [16 of 4 slots][16 rows][4]
  float *weight_steps_, *scores_;  // [blocks][16 rows]; [kSpan][16 rows]
  float* scales_of_;              // of a group's heads, [kSpan][8 heads][2]; of a head that has a block alone, [2][kSpan]
  struct {
    int64_t slot, end, offset;  // slots that are left, and where their values lie
    __mmask64 mask;
    int8_t* to;
  } values_ahead_;
  Memory memory_[8];
};

void Int8Products::Begin() {
  transposes_values_ = blocks_ > 1 && item_.spans == nullptr;
  int64_t rows = groups_ * blocks_ * kSide, width = DTiles() * kBytes;
  q_ = Scratch<int8_t>(memory_[0], shared_ * rows * kPlanes * width), q_steps_ = Scratch<float>(memory_[1], rows);
  keys_ = Scratch<int8_t>(memory_[2], shared_ * kSpan * width);
  values_ = Scratch<int8_t>(memory_[3], 2 * kSpan * kBytes), weights_ = Scratch<int8_t>(memory_[4], blocks_ * kPlanes * kSpan * kSide);
  weight_steps_ = Scratch<float>(memory_[5], blocks_ * kSide), scores_ = Scratch<float>(memory_[6], kSpan * kSide);
  scales_of_ = Scratch<float>(memory_[7], kSpan * kSide);
  steps_of_power_ = 0x1p14f;
  for (int64_t most = kWholeD; most < p_.D; most *= 2) steps_of_power_ /= 2;
}

// Returns the step of a query's words, and one divided by it; NaN, and 0, where a number is infinite or NaN.
std::pair<float, float> Int8Products::StepOf(const bf16* q) const {
  float largest = LargestOf(q, p_.D), power = FromBf16(ToBf16(largest) & 0x7f80);
  if (largest < kNothing) return {0.0f, 0.0f};
  float step = largest <= std::numeric_limits<float>::max() ? power / steps_of_power_ : std::numeric_limits<float>::quiet_NaN();
  return {step, steps_of_power_ / power};
}

// Makes words of 64 numbers, or of 32 (has_second: false), in steps of 1 / inverse, as two planes: their upper bytes and their
// lower ones.
inline void PlanesOf(const bf16* q, bool has_second, float inverse, __m512i* upper, __m512i* lower) {
  const __m512 by = _mm512_set1_ps(inverse);
  auto words = [&](__m512i x) {
    __m512i even = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), by));
    __m512i odd = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000))), by));
    return _mm512_mask_mov_epi16(even, 0xaaaaaaaa, _mm512_slli_epi32(odd, 16));
  };
  __m512i first = words(_mm512_loadu_si512(q));
  __m512i last = words(has_second ? _mm512_loadu_si512(q + kDepth) : _mm512_setzero_si512());
  // Packing takes eight bytes of both in turn.
  const __m512i order = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15), low = _mm512_set1_epi16(0xff);
  __m512i uppers = _mm512_packs_epi16(_mm512_srai_epi16(first, 8), _mm512_srai_epi16(last, 8));
  __m512i lowers = _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(last, low));
  *upper = _mm512_permutexvar_epi32(order, uppers), *lower = _mm512_permutexvar_epi32(order, lowers);
}

// Packs the query rows of a group's heads, each head's with zeros in the rows of others.
void Int8Products::PackQueries(int64_t group) {
  int64_t size = kPlanes * DTiles() * kTileBytes;  // bytes of a block of a head
  for (int64_t block = 0; block < blocks_; ++block) {
    const bf16* from[kSide];
    float inverses[kSide], *steps = q_steps_ + (group * blocks_ + block) * kSide;
    std::fill(from, from + kSide, p_.q), std::fill(steps, steps + kSide, 0.0f), std::fill(inverses, inverses + kSide, 0.0f);
    EachRow(group, block, [&](int64_t row, int64_t place) {
      from[row] = p_.q + place * p_.D, std::tie(steps[row], inverses[row]) = StepOf(from[row]);
    });
    int8_t* packed = q_ + (group * shared_ * blocks_ + block) * size;
    for (int64_t d = 0; d < p_.D; d += kBytes, packed += kPlanes * kTileBytes) {
      __m512i uppers[kSide], lowers[kSide];
      for (int64_t i = 0; i < kSide; ++i) PlanesOf(from[i] + d, d + kDepth < p_.D, inverses[i], uppers + i, lowers + i);
      StoreOfHeads(group, block, uppers, packed, blocks_ * size);
      StoreOfHeads(group, block, lowers, packed + kTileBytes, blocks_ * size);
    }
  }
}

void Int8Products::AttendSpan(int64_t group, int64_t first) {
  int64_t begin = std::max(first, item_.begin) - first, end = std::min(first + kSpan, item_.end) - first;
  int64_t low = TileBegin(begin), high = TileEnd(end);
  int64_t head = group * shared_, last = head + GroupHeads(group);
  for (int64_t h = head; h < last; ++h) PackKeys(h, low, high);
  GatherScales(group, low, high);
  EachPair(first, [&](int64_t pair, int64_t begin, int64_t end) {
    for (int64_t half = 0; half < 1 + HasSecond(pair); ++half) {
      Seen seen = SeenBy(pairs_[pair / 2], half, first, begin, end);
      if (shared_ > 1) {
        TakeScores<true>(group, pair + half, seen);
      } else {
        TakeScores<false>(group, pair + half, seen);
      }
    }
  });
  // Values are put side by side while those before are multiplied.
  auto values_of = [&](int64_t step) { return values_ + step % 2 * kSpan * kBytes; };
  auto begin_values = [&](int64_t step) {
    BeginValues(head + step / VTiles(), step % VTiles() * kBytes, low, high, values_of(step));
  };
  begin_values(0), PackValues(kSpan);
  for (int64_t step = 0, steps = (last - head) * VTiles(); step < steps; ++step) {
    if (transposes_values_) TransposeValues(values_of(step), low, high);
    if (step + 1 < steps) begin_values(step + 1);
    EachPair(first, [&](int64_t pair, int64_t begin, int64_t end) {
      for (int64_t half = 0; half < 1 + HasSecond(pair); ++half) {
        Weigh(head + step / VTiles(), pair + half, step % VTiles() * kBytes, TileBegin(begin), TileEnd(end), values_of(step));
      }
    });
    PackValues(kSpan);
  }
}

// Copies keys of slots that do not lie evenly apart, and all where several products read them.
void Int8Products::PackKeys(int64_t head, int64_t begin, int64_t end) {
  int64_t offset = head * p_.Apart(), in_group = head % shared_, width = DTiles() * kBytes;
  for (int64_t tile = begin / kSide; tile < end / kSide; ++tile) {
    const int8_t* const* slots = slots_ + tile * kSide;
    if (evenly_apart_[tile] && blocks_ == 1) {
      key_tiles_[in_group][tile] = {slots[0] + offset, p_.Stride()};
      continue;
    }
    int8_t* to = keys_ + (in_group * kSpan + tile * kSide) * width;
    key_tiles_[in_group][tile] = {to, width};
    for (int64_t slot = 0; slot < kSide; ++slot, to += width) {
      for (int64_t d = 0; d < width; d += kBytes) _mm512_store_si512(to + d, _mm512_loadu_si512(slots[slot] + offset + d));
    }
  }
}

// Begins with the dimensions [d, d + 64) of a head's values of these slots, whole 64.
void Int8Products::BeginValues(int64_t head, int64_t d, int64_t begin, int64_t end, int8_t* to) {
  __mmask64 mask = p_.V - d >= kBytes ? ~0ull : 0xffffffff;
  values_ahead_ = {begin, end, head * p_.Apart() + p_.ValueAt() + d, mask, to};
}

// Puts the values of so many slots more side by side, four slots at a time.
void Int8Products::PackValues(int64_t slots) {
  constexpr int64_t kOther = kSpan * kSide;  // bytes to other dimensions
  auto& [slot, end, offset, mask, to] = values_ahead_;
  for (int64_t last = std::min(end, slot + slots); slot < last; slot += 4) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) x[i] = _mm512_maskz_loadu_epi8(mask, slots_[slot + i] + offset);
    __m512i low[2] = {_mm512_unpacklo_epi8(x[0], x[1]), _mm512_unpacklo_epi8(x[2], x[3])};
    __m512i high[2] = {_mm512_unpackhi_epi8(x[0], x[1]), _mm512_unpackhi_epi8(x[2], x[3])};
    int8_t* at = to + slot * kSide;
    _mm512_store_si512(at, _mm512_unpacklo_epi16(low[0], low[1]));
    _mm512_store_si512(at + kOther, _mm512_unpackhi_epi16(low[0], low[1]));
    _mm512_store_si512(at + 2 * kOther, _mm512_unpacklo_epi16(high[0], high[1]));
    _mm512_store_si512(at + 3 * kOther, _mm512_unpackhi_epi16(high[0], high[1]));
    ahead_.Fetch(1);
  }
}

// Transposes what PackValues wrote of the slots [begin, end), so that a dimension's 64 slots are side by side.
void Int8Products::TransposeValues(int8_t* values, int64_t begin, int64_t end) const {
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t slot = begin; slot < end; slot += kBytes) {
      int8_t* tile = values + (i * kSpan + slot) * kSide;
      __m512i rows[kSide];
#pragma GCC unroll 16
      for (int64_t j = 0; j < kSide; ++j) rows[j] = _mm512_load_si512(tile + j * kBytes);
      Transpose(rows, [&](int64_t j, __m512i row) { _mm512_store_si512(tile + j * kBytes, row); });
    }
  }
}

// Copies the scales of slots, zeros where a slot is not seen. A scale of values that is NaN becomes infinite, as the largest of
// weights times scales passes over NaN.
void Int8Products::GatherScales(int64_t group, int64_t begin, int64_t end) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  __mmask16 mask = (1u << 2 * GroupHeads(group)) - 1;
  int64_t offset = 2 * group * shared_;
  for (int64_t slot = begin; slot < end; ++slot) {
    const float* from = scales_[slot];
    if (shared_ > 1) {
      __m512 scales = from == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, from + offset);
      __mmask16 is_nan = _mm512_cmp_ps_mask(scales, scales, _CMP_UNORD_Q) & 0xaaaa;
      _mm512_store_ps(scales_of_ + slot * kSide, _mm512_mask_mov_ps(scales, is_nan, _mm512_set1_ps(kInfinite)));
    } else {
      float of_key = from == nullptr ? 0.0f : from[offset], of_value = from == nullptr ? 0.0f : from[offset + 1];
      scales_of_[slot] = of_key, scales_of_[kSpan + slot] = std::isnan(of_value) ? kInfinite : of_value;
    }
  }
}

__m512i Int8Products::OrderOfScales(int64_t part) const {
  alignas(64) int32_t order[kSide];
  for (int64_t i = 0; i < kSide; ++i) order[i] = 2 * (i / head_rows_ % shared_) + part;
  return _mm512_load_si512(order);
}

// Computes the scores of a block's rows in steps of their queries. Returns each row's largest one of the slots that it sees. The
// sums of 16 slots are written while the next ones are multiplied: a core that waits to write a tile multiplies nothing meanwhile.
template <bool is_shared>
__m512 Int8Products::Score(int64_t group, int64_t block, const Seen& seen) {
  const int8_t* q = q_ + (group * shared_ * blocks_ + block) * kPlanes * DTiles() * kTileBytes;
  const __m512i order = OrderOfScales(0);
  alignas(64) int32_t sums[2][kPlanes][kSide * kSide];
  __m512 tops[2] = {_mm512_set1_ps(kMasked), _mm512_set1_ps(kMasked)};  // a maximum is waited for
  auto multiply = [&](int64_t slot, auto is_odd) {
    if (slot >= seen.end) return;
    auto fetch = [&] { ahead_.Fetch(2); };
    MultiplyKeys<is_odd>(key_tiles_[0] + slot / kSide, GroupHeads(group), q, DTiles(), slot == seen.begin, fetch);
  };
  auto score_by = [&](int64_t slot, const int32_t* upper, const auto& mask) {
    float* scores = scores_ + slot * kSide;
#pragma GCC unroll 16
    for (int64_t i = 0; i < kSide; ++i) {
      __m512 sum = SumsOfWords(upper + i * kSide, kSide * kSide);
      __m512 score = _mm512_mul_ps(sum, Scales<is_shared>(slot + i, 0, order));
      _mm512_store_ps(scores + i * kSide, score);
      tops[i % 2] = _mm512_mask_max_ps(tops[i % 2], mask(slot + i), tops[i % 2], score);
    }
  };
  auto score = [&](int64_t slot, const int32_t* upper) {
    if (slot >= seen.all_begin && slot < seen.all_end) {
      score_by(slot, upper, [](int64_t) { return __mmask16{0xffff}; });
    } else {
      score_by(slot, upper, seen);
    }
  };
  WriteBeforeTiles();
  multiply(seen.begin, std::false_type());
  for (int64_t slot = seen.begin; slot < seen.end; slot += kPair) {
    multiply(slot + kSide, std::true_type());
    _tile_stored(0, sums[0][0], 64);
    _tile_stored(1, sums[0][1], 64);
    if (slot > seen.begin) score(slot - kSide, sums[1][0]);
    multiply(slot + kPair, std::false_type());
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
    score(slot, sums[0][0]);
  }
  score(seen.end - kSide, sums[1][0]);
  return _mm512_max_ps(tops[0], tops[1]);
}

// Makes weights, relative to a row's largest score, of a block's scores, and words of their products with the scales of values; 0
// where a row does not see the slot.
template <bool is_shared>
Totals Int8Products::Softmax(int64_t group, int64_t block, const Seen& seen, __m512 largest_score) {
  __m512 scale = _mm512_load_ps(q_steps_ + (group * blocks_ + block) * kSide);
  if (p_.soft_cap > 0) {
    for (int64_t slot = seen.begin; slot < seen.end; ++slot) {
      _mm512_store_ps(scores_ + slot * kSide, _mm512_mul_ps(_mm512_load_ps(scores_ + slot * kSide), scale));
    }
    CapScores(scores_, seen.begin, seen.end);
    scale = _mm512_set1_ps(1.0f), largest_score = Largest(seen, scores_);
  } else {
    scale = _mm512_mul_ps(scale, _mm512_set1_ps(p_.scale));
  }
  __m512 top = _mm512_mul_ps(largest_score, scale);
  const __m512 log2_e = _mm512_set1_ps(kLog2E), factor = _mm512_mul_ps(scale, log2_e), base = _mm512_mul_ps(top, log2_e);
  const __m512i order = OrderOfScales(1);
  __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}, most[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  auto take = [&](int64_t slot, int part, __mmask16 mask) {
    float* at = scores_ + slot * kSide;
    __m512 weight = _mm512_maskz_mov_ps(mask, PowerOfTwo(_mm512_fmsub_ps(_mm512_load_ps(at), factor, base)));
    __m512 scaled = _mm512_maskz_mul_ps(mask, weight, Scales<is_shared>(slot, 1, order));
    total[part] = _mm512_add_ps(total[part], weight);
    most[part] = LargerSize(most[part], scaled);
    _mm512_store_ps(at, scaled);
  };
  auto take_all = [&](int64_t slot, int64_t to, const auto& mask) {
    for (; slot < to; slot += 8) {
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) {
        take(slot + i, i % 2, mask(slot + i));
        if (i % 2 == 1) ahead_.Fetch(1);
      }
    }
  };
  seen.InTurn([&](int64_t slot, int64_t to) { take_all(slot, to, seen); },
              [&](int64_t slot, int64_t to) { take_all(slot, to, [](int64_t) { return __mmask16{0xffff}; }); });

  __m512 largest = LargerSize(most[0], most[1]);
  __mmask16 is_zero = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kNothing), _CMP_LT_OQ);
  __m512 inverse = _mm512_mask_div_ps(_mm512_setzero_ps(), ~is_zero, _mm512_set1_ps(kMostSteps), largest);
  _mm512_store_ps(weight_steps_ + block * kSide, _mm512_maskz_div_ps(~is_zero, largest, _mm512_set1_ps(kMostSteps)));
  int8_t* upper = weights_ + block * kPlanes * kSpan * kSide;
  int8_t* lower = upper + kSpan * kSide;
  // A word is in the lowest bits of its sum with a number whose steps are 1.
  auto word = [&](int64_t slot) {
    __m512 sum = _mm512_fmadd_ps(_mm512_load_ps(scores_ + slot * kSide), inverse, _mm512_set1_ps(0x1.8p23f));
    return _mm512_castps_si512(sum);
  };
  // Where the bytes of a lane come from that move up by two places, and up and down by one.
  const __m512i lanes = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
  const __m512i by_two = _mm512_add_epi32(lanes, _mm512_set1_epi32(0x01000100));
  const __m512i up_by_one = _mm512_add_epi32(lanes, _mm512_set1_epi32(0x02010000));
  const __m512i down_by_one = _mm512_add_epi32(lanes, _mm512_set1_epi32(0x03030201));
  int64_t begin = TileBegin(seen.begin), end = TileEnd(seen.end);
  std::fill(scores_ + begin * kSide, scores_ + seen.begin * kSide, 0.0f);
  std::fill(scores_ + seen.end * kSide, scores_ + end * kSide, 0.0f);
  for (int64_t slot = begin; slot < end; slot += kBytes) {
    __m512i uppers[kSide], lowers[kSide];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kSide; ++i) {
      int64_t first = slot + 4 * i;
      __m512i even = _mm512_mask_shuffle_epi8(word(first), 0xcccccccccccccccc, word(first + 2), by_two);
      __m512i odd = _mm512_mask_shuffle_epi8(word(first + 1), 0xcccccccccccccccc, word(first + 3), by_two);
      uppers[i] = _mm512_mask_shuffle_epi8(odd, 0x5555555555555555, even, down_by_one);
      lowers[i] = _mm512_mask_shuffle_epi8(even, 0xaaaaaaaaaaaaaaaa, odd, up_by_one);
      ahead_.Fetch(1);
    }
    StoreWeights(uppers, upper + slot * kSide), StoreWeights(lowers, lower + slot * kSide);
  }
  return {top, _mm512_add_ps(total[0], total[1])};
}

// Writes a plane of the weights of 64 slots, four of a row side by side, as a tile.
void Int8Products::StoreWeights(__m512i (&weights)[kSide], int8_t* to) const {
  auto store = [&](int64_t i, __m512i row) { _mm512_store_si512(to + i * kBytes, row); };
  if (transposes_values_) {
#pragma GCC unroll 16
    for (int64_t i = 0; i < kSide; ++i) store(i, weights[i]);
  } else {
    Transpose(weights, store);
  }
}

// Adds up the values of slots [begin, end), dimensions [d, d + 64), by the weights of a head's rows in a block.
void Int8Products::Weigh(int64_t head, int64_t block, int64_t d, int64_t begin, int64_t end, const int8_t* values) {
  alignas(64) int32_t sums[kPlanes][4][kSide * kSide];  // of 16 dimensions, a quarter of each 16, a tile
  const int8_t* weights = weights_ + (block * kPlanes * kSpan + begin) * kSide;
  auto fetch = [&] { ahead_.Fetch(1); };
  auto pack = [&] { PackValues(kPair); };
  for (int64_t i = 0; i < 4; i += 2) {
    const int8_t* v = values + (i * kSpan + begin) * kSide;
    if (transposes_values_) {
      MultiplyValues<true>(weights, v, (end - begin) / kBytes, sums[0][i], fetch, pack);
    } else {
      MultiplyValues<false>(weights, v, (end - begin) / kBytes, sums[0][i], fetch, pack);
    }
  }
  if (transposes_values_) return AddTransposed(GroupOf(head), block, d, sums[0][0]);
  int64_t row, last;
  RowsOf(head, block, &row, &last);
  for (; row < last; ++row) {
    __m512 parts[4], step = _mm512_set1_ps(weight_steps_[block * kSide + row]);
#pragma GCC unroll 4
    for (int64_t i = 0; i < 4; ++i) {
      parts[i] = _mm512_mul_ps(SumsOfWords(sums[0][i] + row * kSide, 4 * kSide * kSide), step);
    }
    // Quarter n of part i has the dimensions 16 n + 4 i and the three after it.
    __m512 a = _mm512_shuffle_f32x4(parts[0], parts[1], 0x88), b = _mm512_shuffle_f32x4(parts[2], parts[3], 0x88);
    __m512 c = _mm512_shuffle_f32x4(parts[0], parts[1], 0xdd), e = _mm512_shuffle_f32x4(parts[2], parts[3], 0xdd);
    AddSums(GroupOf(head), block, row, d, _mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(c, e, 0x88));
    if (d + kPair < p_.V) {
      AddSums(GroupOf(head), block, row, d + kPair, _mm512_shuffle_f32x4(a, b, 0xdd), _mm512_shuffle_f32x4(c, e, 0xdd));
    }
  }
}

// Adds what a span has of dimensions [d, d + 64) to the transposed sums of a block. sums: [2 planes][4][16 dimensions][16 rows].
void Int8Products::AddTransposed(int64_t group, int64_t block, int64_t d, const int32_t* sums) {
  const Factors& factors = factors_[block];
  const __m512 before = _mm512_load_ps(factors.before), now = _mm512_load_ps(factors.now);
  const __m512 step = _mm512_load_ps(weight_steps_ + block * kSide);
  float* o = Sums(group, block * kSide, 0) + d * kSide;
  for (int64_t i = 0; i < 4; ++i) {
#pragma GCC unroll 16
    for (int64_t j = 0; j < kSide; ++j) {
      int64_t dimension = j / 4 * kSide + i * 4 + j % 4;  // as PackValues puts them
      if (d + dimension >= p_.V) continue;
      float* to = o + dimension * kSide;
      __m512 sum = _mm512_mul_ps(SumsOfWords(sums + (i * kSide + j) * kSide, 4 * kSide * kSide), step);
      __m512 until_now = _mm512_maskz_load_ps(factors.saw_before, to);
      _mm512_mask_store_ps(to, factors.seen, _mm512_fmadd_ps(until_now, before, _mm512_mul_ps(sum, now)));
    }
  }
}

// Writes the results of a group.
void Int8Products::Write(int64_t group) {
  if (!transposes_values_) return SpanAttention::Write(group);
  for (int64_t block = 0; block < blocks_; ++block) {
    const __m512 inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(totals_ + (group * blocks_ + block) * kSide));
    int64_t rows = BlockRows(group, block);
    bf16* to[kSide];
    EachRow(group, block, [&](int64_t row, int64_t place) { to[row] = p_.o + place * p_.V; });
    for (int64_t d = 0; d < p_.V; d += kPair) {
      alignas(64) float results[kSide][kPair];
      const float* sums = Sums(group, block * kSide, d);
      for (int64_t half = 0; half < kPair; half += kSide) {
        __m512i numbers[kSide];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kSide; ++i) {
          numbers[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_load_ps(sums + (half + i) * kSide), inverse));
        }
        Transpose(numbers, [&](int64_t row, __m512i of_row) { _mm512_store_si512(results[row] + half, of_row); });
      }
      for (int64_t row = 0; row < rows; ++row) {
        Put(to[row] + d, _mm512_load_ps(results[row]), _mm512_load_ps(results[row] + kSide));
      }
    }
  }
}

}  // namespace

void AttendInt8(const Problem& p, const Item& item, const Item* after) {
  Tiles tiles_of_this_thread;
  ThreadLocal<Int8Products>().Attend(p, item, after);
}

}  // namespace jpaged::amx
