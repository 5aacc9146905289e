// Paged attention over a pool of int8 with AMX, in integers; see attend.h. Not of latents.
//
// The arithmetic is that of int8_tiles.h: queries become words in steps of a power of two, and weights, times the scales of
// values, words in steps of a 32767th of the largest that a query has, here in a span. Tiles multiply bytes, so a word is two
// planes of them: its upper byte, which has the sign, and its lower one, which has none. Sums of both are exact in 32 bits, and so
// are 256 times the first plus the second: of keys as int8_tiles.h says, of a span of values below 2^15 * 2^7 * 256 = 2^30.
//
// Keys are used as they lie, 64 dimensions in a row of a tile: past the end of a key begins its value, which the zeros of a query
// meet. Values of four slots are put side by side.
#include <limits>

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

// sums[i][plane] = a[head][i] . q[head][plane], of all heads; i: one of two groups of 16 slots. a: [heads][kSpan / 16]. Calls
// `fetch` for each product of tiles, and `between` for each tile of a key.
template <typename Fetch, typename Between>
void MultiplyKeys(const Keys* a, int64_t heads, const int8_t* q, int64_t tiles, int32_t* sums, const Fetch& fetch,
                  const Between& between) {
  WriteBeforeTiles();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t head = 0; head < heads; ++head, a += kSpan / kSide) {
    for (int64_t i = 0; i < tiles; ++i, q += kPlanes * kTileBytes) {
      _tile_loadd(6, q, kBytes);
      _tile_loadd(4, a[0].first + i * kBytes, a[0].stride);
      _tile_dpbssd(0, 4, 6);
      fetch();
      _tile_loadd(7, q + kTileBytes, kBytes);
      _tile_dpbsud(1, 4, 7);
      fetch();
      _tile_loadd(5, a[1].first + i * kBytes, a[1].stride);
      _tile_dpbssd(2, 5, 6);
      fetch();
      _tile_dpbsud(3, 5, 7);
      fetch(), between();
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSide * kSide, 64);
  _tile_stored(2, sums + 2 * kSide * kSide, 64);
  _tile_stored(3, sums + 3 * kSide * kSide, 64);
}

// sums[plane][i] = weights[plane] . v[i], along so many tiles; i: one of two groups of 16 dimensions. weights: [2][tiles of a
// span], v: [4][tiles of a span].
template <typename Fetch, typename Between>
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
    _tile_loadd(6, v, kBytes);
    _tile_dpbssd(0, 4, 6);
    fetch();
    _tile_loadd(5, weights + kOther, kBytes);
    _tile_dpbusd(2, 5, 6);
    fetch();
    _tile_loadd(7, v + kOther, kBytes);
    _tile_dpbssd(1, 4, 7);
    fetch();
    _tile_dpbusd(3, 5, 7);
    fetch(), between();
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kSide * kSide, 64);
  _tile_stored(2, sums + kPlanes * 2 * kSide * kSide, 64);
  _tile_stored(3, sums + (kPlanes * 2 + 1) * kSide * kSide, 64);
}

// Returns 16 sums of words, of the sums of their planes, which lie so far apart.
inline __m512 SumsOfWords(const int32_t* upper, int64_t apart) {
  __m512i sums = _mm512_slli_epi32(_mm512_load_si512(upper), 8);
  return _mm512_cvtepi32_ps(_mm512_add_epi32(sums, _mm512_load_si512(upper + apart)));
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
  static constexpr int64_t kStep = kBytes, kMostShared = 8;  // heads whose scales of a slot fill a register

  void Begin();
  void PackQueries(int64_t group);
  int64_t Shares(int64_t heads) const {
    int64_t groups = (heads + shared_ - 1) / shared_;
    return heads * (blocks_ * DTiles() * 4 + VTiles() * (blocks_ * 4 + 8)) + groups * blocks_ * 24;
  }
  void AttendSpan(int64_t group, int64_t first);
  static void Put(bf16* to, __m512 low, __m512 high) { avx512::PutRounded(to, low), avx512::PutRounded(to + kSide, high); }

 private:
  float PackQuery(const bf16* q, int8_t* upper, int8_t* lower) const;
  void PackKeys(int64_t head, int64_t begin, int64_t end);
  void BeginValues(int64_t head, int64_t d, int64_t begin, int64_t end, int8_t* to);
  void PackValues(int64_t slots);
  void GatherScales(int64_t group, int64_t begin, int64_t end);
  template <bool is_shared>
  void Score(int64_t group, int64_t block, const Seen& seen);
  template <bool is_shared>
  Totals Softmax(const Seen& seen, int64_t block);
  void Weigh(int64_t head, int64_t block, int64_t d, int64_t begin, int64_t end, const int8_t* values);

  int64_t DTiles() const { return (p_.D + kBytes - 1) / kBytes; }
  int64_t VTiles() const { return (p_.V + kBytes - 1) / kBytes; }
  // Of the scales of a slot of a group, [heads][2], those of each row's head: of keys (0) or of values (1).
  __m512i OrderOfScales(int64_t part) const;
  template <bool is_shared>
  __m512 Scales(int64_t slot, int64_t part, __m512i order) const {
    if constexpr (is_shared) return _mm512_permutexvar_ps(order, _mm512_load_ps(scales_of_ + slot * kSide));
    return _mm512_set1_ps(scales_of_[part * kSpan + slot]);
  }

  Keys key_tiles_[kMostShared][kSpan / kSide];  // of a group's heads
  float steps_of_power_;                        // of the power of two that a query's largest number is at least
  int8_t* q_;                     // [groups][shared heads][blocks][D / 64][2 planes][16 of 4 dimensions][16 rows][4]
  float* q_steps_;                // [groups][blocks][16 rows]
  int8_t* planes_;                // of the queries of a block, [2][16 rows][D]
  int8_t* keys_;                  // [shared heads][kSpan / 16][D / 64][16 slots][64], those that are not used as they lie
  int8_t* values_;                // [2][4][kSpan / 64][16 of 4 slots][16 dimensions][4]
  int8_t* weights_;               // [blocks][2 planes][kSpan / 64][16 rows][64 slots]
  float *weight_steps_, *scores_;  // [blocks][16 rows]; [kSpan][16 rows]
  float* scales_of_;              // of a group's heads, [kSpan][8 heads][2]; of a head that has a block alone, [2][kSpan]
  struct {
    int64_t slot, end, offset;  // slots that are left, and where their values lie
    __mmask64 mask;
    int8_t* to;
  } values_ahead_;
  Memory memory_[9];
};

void Int8Products::Begin() {
  int64_t rows = groups_ * blocks_ * kSide, width = DTiles() * kBytes;
  q_ = Scratch<int8_t>(memory_[0], shared_ * rows * kPlanes * width), q_steps_ = Scratch<float>(memory_[1], rows);
  planes_ = Scratch<int8_t>(memory_[2], kPlanes * kSide * width), keys_ = Scratch<int8_t>(memory_[3], shared_ * kSpan * width);
  values_ = Scratch<int8_t>(memory_[4], 2 * kSpan * kBytes), weights_ = Scratch<int8_t>(memory_[5], blocks_ * kPlanes * kSpan * kSide);
  weight_steps_ = Scratch<float>(memory_[6], blocks_ * kSide), scores_ = Scratch<float>(memory_[7], kSpan * kSide);
  scales_of_ = Scratch<float>(memory_[8], kSpan * kSide);
  steps_of_power_ = 0x1p14f;
  for (int64_t most = kWholeD; most < p_.D; most *= 2) steps_of_power_ /= 2;
}

// Writes the planes of a query's words. Returns their step; NaN where a number is infinite or NaN.
float Int8Products::PackQuery(const bf16* q, int8_t* upper, int8_t* lower) const {
  float largest = LargestOf(q, p_.D), power = FromBf16(ToBf16(largest) & 0x7f80), inverse = 0.0f, step = 0.0f;
  if (largest >= kNothing) step = power / steps_of_power_, inverse = steps_of_power_ / power;
  if (!(largest <= std::numeric_limits<float>::max())) step = std::numeric_limits<float>::quiet_NaN();
  for (int64_t d = 0; d < p_.D; d += kSide) {
    __m512i x = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(q + d))), 16);
    __m512i words = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(x), _mm512_set1_ps(inverse)));
    _mm_storeu_si128((__m128i*)(upper + d), _mm512_cvtepi32_epi8(_mm512_srai_epi32(words, 8)));
    _mm_storeu_si128((__m128i*)(lower + d), _mm512_cvtepi32_epi8(words));
  }
  return step;
}

// Packs the query rows of a group's heads, each head's with zeros in the rows of others.
void Int8Products::PackQueries(int64_t group) {
  int64_t width = DTiles() * kBytes, size = kPlanes * DTiles() * kTileBytes;  // size: bytes of a block of a head
  int8_t *upper = planes_, *lower = planes_ + kSide * width;
  for (int64_t block = 0; block < blocks_; ++block) {
    std::memset(planes_, 0, kPlanes * kSide * width);
    float* steps = q_steps_ + (group * blocks_ + block) * kSide;
    for (int64_t i = 0; i < kSide; ++i) {
      int64_t row = block * kSide + i;
      bool is_query = row < GroupRows(group);
      steps[i] = is_query ? PackQuery(p_.q + Place(group, row, p_.D), upper + i * width, lower + i * width) : 0.0f;
    }
    int8_t* packed = q_ + (group * shared_ * blocks_ + block) * size;
    for (int64_t d = 0; d < width; d += kBytes) {
      for (const int8_t* plane : {upper, lower}) {
        __m512i rows[kSide];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kSide; ++i) rows[i] = _mm512_loadu_si512(plane + i * width + d);
        StoreOfHeads(group, block, rows, packed, blocks_ * size);
        packed += kTileBytes;
      }
    }
  }
}

void Int8Products::AttendSpan(int64_t group, int64_t first) {
  int64_t begin = std::max(first, item_.begin) - first, end = std::min(first + kSpan, item_.end) - first;
  int64_t low = begin / kStep * kStep, high = (end + kStep - 1) / kStep * kStep;
  int64_t head = group * shared_, last = head + GroupHeads(group);
  for (int64_t h = head; h < last; ++h) PackKeys(h, low, high);
  GatherScales(group, low, high);
  EachPair(first, [&](int64_t pair, int64_t begin, int64_t end) {
    for (int64_t half = 0; half < 1 + HasSecond(pair); ++half) {
      Seen seen = SeenBy(pairs_[pair / 2], half, first, begin, end);
      if (shared_ > 1) {
        Score<true>(group, pair + half, seen), TakeTotals(group, pair + half, Softmax<true>(seen, pair + half));
      } else {
        Score<false>(group, pair + half, seen), TakeTotals(group, pair + half, Softmax<false>(seen, pair + half));
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
    if (step + 1 < steps) begin_values(step + 1);
    EachPair(first, [&](int64_t pair, int64_t begin, int64_t end) {
      for (int64_t half = 0; half < 1 + HasSecond(pair); ++half) {
        Weigh(head + step / VTiles(), pair + half, step % VTiles() * kBytes, begin, end, values_of(step));
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

// Copies the scales of slots, zeros where a slot is not seen.
void Int8Products::GatherScales(int64_t group, int64_t begin, int64_t end) {
  __mmask16 mask = (1u << 2 * GroupHeads(group)) - 1;
  int64_t offset = 2 * group * shared_;
  for (int64_t slot = begin; slot < end; ++slot) {
    const float* from = scales_[slot];
    if (shared_ > 1) {
      __m512 scales = from == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, from + offset);
      _mm512_store_ps(scales_of_ + slot * kSide, scales);
    } else {
      for (int64_t part = 0; part < 2; ++part) scales_of_[part * kSpan + slot] = from == nullptr ? 0.0f : from[offset + part];
    }
  }
}

__m512i Int8Products::OrderOfScales(int64_t part) const {
  alignas(64) int32_t order[kSide];
  for (int64_t i = 0; i < kSide; ++i) order[i] = 2 * (i / head_rows_ % shared_) + part;
  return _mm512_load_si512(order);
}

// The scores of a block's rows. Sums of the slots before become scores while tiles are multiplied.
template <bool is_shared>
void Int8Products::Score(int64_t group, int64_t block, const Seen& seen) {
  int64_t size = kPlanes * DTiles() * kTileBytes, calls = GroupHeads(group) * DTiles(), share = (kPair / 4 + calls - 1) / calls * 4;
  const int8_t* q = q_ + (group * shared_ * blocks_ + block) * size;
  const __m512 steps = _mm512_load_ps(q_steps_ + (group * blocks_ + block) * kSide);
  const __m512i order = OrderOfScales(0);
  alignas(64) int32_t sums[2][2][kPlanes][kSide * kSide];
  int64_t slot = seen.begin, done = slot;
  auto score_to = [&](int64_t end) {
    for (; done < end; done += 4) {
      const int32_t* upper = sums[done / kPair % 2][done / kSide % 2][0] + done % kSide * kSide;
      float* scores = scores_ + done * kSide;
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i) {
        __m512 scales = _mm512_mul_ps(Scales<is_shared>(done + i, 0, order), steps);
        _mm512_store_ps(scores + i * kSide, _mm512_mul_ps(SumsOfWords(upper + i * kSide, kSide * kSide), scales));
      }
    }
  };
  for (; slot < seen.end; slot += kPair) {
    MultiplyKeys(key_tiles_[0] + slot / kSide, GroupHeads(group), q, DTiles(), sums[slot / kPair % 2][0][0],
                 [&] { ahead_.Fetch(1); }, [&] { score_to(std::min(slot, done + share)); });
    score_to(slot);
  }
  score_to(slot);
}

// Makes weights, relative to a row's largest score, of a block's scores, and words of their products with the scales of values; 0
// where a row does not see the slot.
template <bool is_shared>
Totals Int8Products::Softmax(const Seen& seen, int64_t block) {
  if (p_.soft_cap > 0) CapScores(scores_, seen.begin, seen.end);
  float scale = p_.soft_cap > 0 ? 1.0f : p_.scale;
  __m512 top = _mm512_mul_ps(Largest(seen, scores_), _mm512_set1_ps(scale));
  const __m512 factor = _mm512_set1_ps(scale * kLog2E), base = _mm512_mul_ps(top, _mm512_set1_ps(kLog2E));
  const __m512i order = OrderOfScales(1), sizes = _mm512_set1_epi32(0x7fffffff);
  __m512 total[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  __m512i most[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};  // bits without a sign, as LargestOf has them
  auto take = [&](int64_t slot, int part, __mmask16 mask) {
    float* at = scores_ + slot * kSide;
    __m512 weight = _mm512_maskz_mov_ps(mask, PowerOfTwo(_mm512_fmsub_ps(_mm512_load_ps(at), factor, base)));
    __m512 scaled = _mm512_maskz_mul_ps(mask, weight, Scales<is_shared>(slot, 1, order));
    total[part] = _mm512_add_ps(total[part], weight);
    most[part] = _mm512_max_epu32(most[part], _mm512_and_si512(_mm512_castps_si512(scaled), sizes));
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

  __m512 largest = _mm512_castsi512_ps(_mm512_max_epu32(most[0], most[1]));
  __mmask16 is_zero = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kNothing), _CMP_LT_OQ);
  __m512 inverse = _mm512_mask_div_ps(_mm512_setzero_ps(), ~is_zero, _mm512_set1_ps(kMostSteps), largest);
  _mm512_store_ps(weight_steps_ + block * kSide, _mm512_maskz_div_ps(~is_zero, largest, _mm512_set1_ps(kMostSteps)));
  int8_t* upper = weights_ + block * kPlanes * kSpan * kSide;
  int8_t* lower = upper + kSpan * kSide;
  auto word = [&](int64_t slot) { return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(scores_ + slot * kSide), inverse)); };
  // Two words of each lane.
  auto words = [&](int64_t slot) { return _mm512_mask_mov_epi16(word(slot), 0xaaaaaaaa, _mm512_slli_epi32(word(slot + 2), 16)); };
  for (int64_t slot = seen.begin; slot < seen.end; slot += kBytes) {
    __m512i uppers[kSide], lowers[kSide];
#pragma GCC unroll 16
    for (int64_t i = 0; i < kSide; ++i) {
      __m512i even = words(slot + 4 * i), odd = words(slot + 4 * i + 1);
      uppers[i] = _mm512_mask_mov_epi8(_mm512_srli_epi16(even, 8), 0xaaaaaaaaaaaaaaaa, odd);
      lowers[i] = _mm512_mask_mov_epi8(even, 0xaaaaaaaaaaaaaaaa, _mm512_slli_epi16(odd, 8));
      ahead_.Fetch(1);
    }
    Transpose(uppers, [&](int64_t j, __m512i row) { _mm512_store_si512(upper + slot * kSide + j * kBytes, row); });
    Transpose(lowers, [&](int64_t j, __m512i row) { _mm512_store_si512(lower + slot * kSide + j * kBytes, row); });
  }
  return {top, _mm512_add_ps(total[0], total[1])};
}

// Adds up the values of slots [begin, end), dimensions [d, d + 64), by the weights of a head's rows in a block.
void Int8Products::Weigh(int64_t head, int64_t block, int64_t d, int64_t begin, int64_t end, const int8_t* values) {
  alignas(64) int32_t sums[kPlanes][4][kSide * kSide];  // of 16 dimensions, a quarter of each 16, a tile
  const int8_t* weights = weights_ + (block * kPlanes * kSpan + begin) * kSide;
  for (int64_t i = 0; i < 4; i += 2) {
    const int8_t* v = values + (i * kSpan + begin) * kSide;
    MultiplyValues(weights, v, (end - begin) / kBytes, sums[0][i], [&] { ahead_.Fetch(1); }, [&] { PackValues(kPair); });
  }
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

}  // namespace

void AttendInt8(const Problem& p, const Item& item, const Item* after) {
  Tiles tiles_of_this_thread;
  ThreadLocal<Int8Products>().Attend(p, item, after);
}

}  // namespace jpaged::amx
