// Products with weights of int8 and int4 by VNNI, which multiplies bytes without a sign (weights, plus what makes them so) by
// bytes with one: the upper and the lower half of each integer of x; see integers.h.
//
// A register has 8 bytes each of 8 rows: of x, which meet 8 inputs of one output, or, where x has few rows, of 8 outputs,
// which meet 8 inputs of one row of x. Either way a row and output has two sums, of the first and the last 4 of each 8 inputs,
// which are exact up to where a scale ends and are added up in f32 in one order from there on.
#include "../integers.h"

#include <cstring>

#include "lanes.h"

namespace jpaged {
namespace {

constexpr int64_t kRows = 8;      // of x in a tile, and outputs in a group
constexpr int64_t kInputs = 8;    // bytes of a row in a register
constexpr int64_t kLanes = 16;    // sums in a register
constexpr int64_t kChunk = 64;    // weights that become bytes at a time
constexpr int64_t kBlock = 256;   // inputs that share a scale of x
constexpr int64_t kFew = 4;       // rows of x for which outputs are gathered
constexpr int64_t kLine = 64;     // bytes in a cache line
constexpr float kMost = 32639.0f;  // 127 * 256 + 127
constexpr float kNothing = 1e-30f;  // what is below is zero: its scale would have no inverse

// Inputs whose sums are exact: of one scale of x, and of w.
constexpr int64_t Segment(Scales kind) { return kind == Scales::kRow ? kBlock : kPacked; }

// What the bytes of a form have in excess.
constexpr int32_t Excess(Form form) { return form == Form::kInt4 ? 8 : 128; }

template <Form form>
constexpr int64_t Bytes(int64_t inputs) {
  return form == Form::kInt4 ? inputs / 2 : inputs;
}

// Rows of x in tiles of 8, [tiles][inputs / 8][upper, lower][8 rows][8], zeros past the last row and input; times scales,
// [tiles][blocks][8 rows][2]; and what the excess of w adds to their sums, to be taken from them, [tiles][segments][8][2].
struct Integers {
  int8_t* values;
  float* scales;
  int32_t* excess;
  int64_t E, blocks, segments;

  int64_t Stride() const { return (E + kChunk - 1) / kChunk * kChunk; }
  const int8_t* At(int64_t tile) const { return values + tile * 2 * kRows * Stride(); }
};

inline __m512 Floats(const bf16* at) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}

// Row `row` of a tile from x. NaN or infinity makes a block's scale so.
void ToIntegers(const bf16* x, const Integers& to, int64_t tile, int64_t row, int64_t segment, int32_t excess) {
  int8_t* values = to.values + tile * 2 * kRows * to.Stride() + row * kInputs;
  for (int64_t first = 0; first < to.E; first += kBlock) {
    int64_t end = std::min(to.E, first + kBlock);
    __m512i most = _mm512_setzero_si512();
    for (int64_t e = first; e < end; e += kPacked) {  // of bits without a sign the larger number has the larger, NaN the largest
      most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + e), _mm512_set1_epi16(0x7fff)));
    }
    __m512i odd = _mm512_srli_epi32(most, 16), even = _mm512_and_si512(most, _mm512_set1_epi32(0xffff));
    uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(odd, even)) << 16;
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    bool is_zero = largest < kNothing;
    float* scale = to.scales + ((tile * to.blocks + first / kBlock) * kRows + row) * 2;
    scale[0] = scale[1] = is_zero ? 0.0f : largest / kMost;
    __m512 inverse = _mm512_set1_ps(is_zero ? 0.0f : kMost / largest);
    for (int64_t begin = first; begin < end; begin += segment) {
      __m512i sums = _mm512_setzero_si512();
      for (int64_t e = begin; e < std::min(end, begin + segment); e += kLanes) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(Floats(x + e), inverse));
        __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        sums = _mm512_add_epi32(sums, whole);
        alignas(16) int8_t halves[2][kLanes];
        _mm_store_si128((__m128i*)halves[0], _mm512_cvtepi32_epi8(upper));
        _mm_store_si128((__m128i*)halves[1], _mm512_cvtepi32_epi8(whole));
        for (int half = 0; half < 2; ++half) {
          for (int64_t i = 0; i < kLanes; i += kInputs) {
            std::memcpy(values + (2 * (e + i) + half * kInputs) * kRows, halves[half] + i, kInputs);
          }
        }
      }
      int32_t* out = to.excess + ((tile * to.segments + begin / segment) * kRows + row) * 2;
      out[0] = -excess * _mm512_mask_reduce_add_epi32(0x0f0f, sums);
      out[1] = -excess * _mm512_mask_reduce_add_epi32(0xf0f0, sums);
    }
  }
}

// 64 weights as they lie, or the 32 at a row's end, as bytes without a sign.
template <Form form>
inline __m512i Widen(const uint8_t* at, bool is_half) {
  if constexpr (form == Form::kInt8) {
    return _mm512_xor_si512(_mm512_maskz_loadu_epi8(is_half ? 0xffffffffull : ~0ull, at), _mm512_set1_epi8(static_cast<char>(0x80)));
  } else {  // a byte holds the values i and i + 16 of its 32
    __m512i bytes = _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(is_half ? 0xffff : ~0u, at));
    __m512i twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), bytes);
    return _mm512_and_si512(_mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4)), _mm512_set1_epi8(15));
  }
}

inline __m512i Eight(const void* at) {
  int64_t bytes;
  std::memcpy(&bytes, at, sizeof(bytes));
  return _mm512_set1_epi64(bytes);
}

inline __m512i Whole(__m512i upper, __m512i lower) { return _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower); }

// A group of outputs: where their weights, scales and zeros begin, the last one's again where there are no more.
struct Group {
  const uint8_t* values[kRows];
  const float *scales[kRows], *zeros[kRows];
  int64_t size;  // inputs of a scale

  template <Form form>
  static Group Of(const Quantized& w, int64_t n) {
    Group group;
    for (int64_t j = 0; j < kRows; ++j) {
      int64_t row = std::min(n + j, w.N - 1);
      group.values[j] = static_cast<const uint8_t*>(w.values) + row * Bytes<form>(w.E);
      group.scales[j] = w.scales + row * w.S;
      group.zeros[j] = w.zeros == nullptr ? nullptr : w.zeros + row * w.S;
    }
    group.size = w.E / w.S;
    return group;
  }
};

// The sums of a tile of x and a group whose bytes are [8][stride]: [8 outputs][8 rows][2]. The first tile makes the bytes
// as it goes, a chunk ahead, while what comes next of w comes from memory: evenly, or the processor waits.
template <Form form, Scales kind, bool is_first>
void Tile(const Integers& x, int64_t tile, uint8_t* bytes, const Group& group, int64_t ahead, float* sums) {
  __m512 totals[kRows];
#pragma GCC unroll 8
  for (int j = 0; j < kRows; ++j) totals[j] = _mm512_setzero_ps();
  const int8_t* values = x.At(tile);
  int64_t stride = x.Stride(), segment = 0;
  auto make = [&](int64_t j, int64_t e) {
    const uint8_t* at = group.values[j] + Bytes<form>(e);
    _mm_prefetch((const char*)at + ahead, _MM_HINT_T1);
    _mm512_storeu_si512(bytes + j * stride + e, Widen<form>(at, x.E - e < kChunk));
  };
  for (int64_t j = 0; is_first && j < kRows; ++j) make(j, 0);
  for (int64_t first = 0; first < x.E; first += Segment(kind), ++segment) {
    __m512i excess = _mm512_loadu_si512(x.excess + (tile * x.segments + segment) * kLanes);
    __m512i upper[kRows], lower[kRows];
#pragma GCC unroll 8
    for (int j = 0; j < kRows; ++j) upper[j] = _mm512_setzero_si512(), lower[j] = excess;
    for (int64_t e = first; e < std::min(x.E, first + Segment(kind)); e += kInputs) {
      if (int64_t next = (e / kChunk + 1) * kChunk; is_first && next < x.E) make(e / kInputs % kRows, next);
      __m512i high = _mm512_loadu_si512(values + 2 * kRows * e), low = _mm512_loadu_si512(values + 2 * kRows * e + kLine);
#pragma GCC unroll 8
      for (int j = 0; j < kRows; ++j) {
        __m512i w = Eight(bytes + j * stride + e);
        upper[j] = _mm512_dpbusd_epi32(upper[j], w, high);
        lower[j] = _mm512_dpbusd_epi32(lower[j], w, low);
      }
    }
    __m512 scale = _mm512_loadu_ps(x.scales + (tile * x.blocks + first / kBlock) * kLanes);
    __m512 each = _mm512_mul_ps(_mm512_cvtepi32_ps(excess), _mm512_set1_ps(1.0f / Excess(Form::kInt4)));
    int64_t g = first / group.size;
#pragma GCC unroll 8
    for (int j = 0; j < kRows; ++j) {
      __m512 number = _mm512_cvtepi32_ps(Whole(upper[j], lower[j]));
      if constexpr (kind == Scales::kRow) {
        totals[j] = _mm512_fmadd_ps(number, scale, totals[j]);
      } else {
        if constexpr (kind == Scales::kZeros) number = _mm512_fmadd_ps(_mm512_set1_ps(group.zeros[j][g]), each, number);
        totals[j] = _mm512_fmadd_ps(_mm512_mul_ps(number, scale), _mm512_set1_ps(group.scales[j][g]), totals[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kRows; ++j) _mm512_storeu_ps(sums + j * kLanes, totals[j]);
}

// The numbers of a group's outputs, scales or zeros: 16 of each output are turned at a time.
class Numbers {
 public:
  Numbers(const float* const (&from)[kRows], int64_t count) : from_(from), count_(count) {}

  // Of each output that at `g`, twice. g grows.
  __m512 Twice(int64_t g) {
    if (g >= end_) {
      __m512i rows[kRows];
      int64_t begin = g / kLanes * kLanes, here = std::min(kLanes, count_ - begin);
      for (int64_t j = 0; j < kRows; ++j) {  // those of the next group are fetched: no one else sees a stream in so few
        _mm_prefetch((const char*)(from_[j] + begin + kRows * count_), _MM_HINT_T1);
        rows[j] = _mm512_maskz_loadu_epi32((1u << here) - 1, from_[j] + begin);
      }
      Transpose(rows, pairs_);
      end_ = begin + kLanes;
    }
    __m512 pair = _mm512_castsi512_ps(pairs_[g % kLanes / 2]);
    return g % 2 == 0 ? _mm512_moveldup_ps(pair) : _mm512_movehdup_ps(pair);
  }

 private:
  const float* const (&from_)[kRows];
  int64_t count_, end_ = 0;
  __m512i pairs_[kRows];
};

// The sums of the first R rows of x and a group, as it lies: [R rows][8 outputs][2].
template <Form form, Scales kind, int R>
void FewRows(const Integers& x, const Group& group, int64_t ahead, float* sums) {
  __m512 totals[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) totals[r] = _mm512_setzero_ps();
  __m512i upper[R], lower[R];
  Numbers scales_of(group.scales, x.E / group.size), zeros_of(group.zeros, x.E / group.size);
  auto begin = [&](int64_t segment) {
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) upper[r] = _mm512_setzero_si512(), lower[r] = Eight(x.excess + segment * kLanes + 2 * r);
  };
  auto end = [&](int64_t first) {
    int64_t g = first / group.size, block = first / kBlock;
    __m512 zeros = kind == Scales::kZeros ? zeros_of.Twice(g) : _mm512_setzero_ps();
    __m512 scales = kind == Scales::kRow ? _mm512_setzero_ps() : scales_of.Twice(g);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __m512 number = _mm512_cvtepi32_ps(Whole(upper[r], lower[r])), scale = _mm512_set1_ps(x.scales[block * kLanes + 2 * r]);
      if constexpr (kind == Scales::kRow) {
        totals[r] = _mm512_fmadd_ps(number, scale, totals[r]);
      } else {
        if constexpr (kind == Scales::kZeros) {
          __m512 excess = _mm512_cvtepi32_ps(Eight(x.excess + first / Segment(kind) * kLanes + 2 * r));
          number = _mm512_fmadd_ps(zeros, _mm512_mul_ps(excess, _mm512_set1_ps(1.0f / Excess(Form::kInt4))), number);
        }
        totals[r] = _mm512_fmadd_ps(_mm512_mul_ps(number, scale), scales, totals[r]);
      }
    }
  };
  for (int64_t first = 0; first < x.E; first += kChunk) {
    __m512i rows[kRows], eights[kRows];
    bool is_half = x.E - first < kChunk;
#pragma GCC unroll 8
    for (int j = 0; j < kRows; ++j) {
      const uint8_t* at = group.values[j] + Bytes<form>(first);
      if (form == Form::kInt8 || first % (2 * kChunk) == 0) _mm_prefetch((const char*)at + ahead, _MM_HINT_T1);
      rows[j] = Widen<form>(at, is_half);
    }
    Transpose(rows, eights);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      int64_t e = first + i * kInputs;
      if (e % Segment(kind) == 0) begin(e / Segment(kind));
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int8_t* own = x.values + (2 * e + r) * kRows;
        upper[r] = _mm512_dpbusd_epi32(upper[r], eights[i], Eight(own));
        lower[r] = _mm512_dpbusd_epi32(lower[r], eights[i], Eight(own + kLine));
      }
      int64_t done = e + kInputs;
      if (done == x.E || done % Segment(kind) == 0) end((done - 1) / Segment(kind) * Segment(kind));
      if (done == x.E) break;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(sums + r * kLanes, totals[r]);
}

// One thread's part: the groups [begin, end) of 8 outputs for all rows of x.
template <Form form, Scales kind>
void MultiplyGroups(const Integers& x, const Quantized& w, float* y, int64_t T, int64_t begin, int64_t end) {
  constexpr decltype(&FewRows<form, kind, 1>) kByRows[kFew] = {&FewRows<form, kind, 1>, &FewRows<form, kind, 2>,
                                                               &FewRows<form, kind, 3>, &FewRows<form, kind, 4>};
  static thread_local std::vector<Line> memory;
  uint8_t* bytes = Room<uint8_t>(memory, kRows * x.Stride());
  int64_t ahead = kRows * Bytes<form>(w.E);  // what comes next of w comes from memory meanwhile
  alignas(64) float sums[kRows * kLanes];
  for (int64_t n = begin * kRows; n < std::min(w.N, end * kRows); n += kRows) {
    Group group = Group::Of<form>(w, n);
    int64_t cols = std::min(kRows, w.N - n);
    // Of row r and output j, the two sums that are left.
    auto put = [&](int64_t row, int64_t j, const float* two) {
      float sum = two[0] + two[1];
      y[row * w.N + n + j] = kind == Scales::kRow ? sum * group.scales[j][0] : sum;
    };
    if (T <= kFew) {
      kByRows[T - 1](x, group, ahead, sums);
      for (int64_t r = 0; r < T; ++r) {
        for (int64_t j = 0; j < cols; ++j) put(r, j, sums + r * kLanes + 2 * j);
      }
      continue;
    }
    for (int64_t t = 0; t < T; t += kRows) {
      auto tile = t == 0 ? &Tile<form, kind, true> : &Tile<form, kind, false>;
      tile(x, t / kRows, bytes, group, ahead, sums);
      for (int64_t r = 0; r < std::min(kRows, T - t); ++r) {
        for (int64_t j = 0; j < cols; ++j) put(t + r, j, sums + j * kLanes + 2 * r);
      }
    }
  }
}

template <Form form, Scales kind>
void MultiplyAs(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  int64_t tiles = (T + kRows - 1) / kRows, segment = Segment(kind);
  Integers from{nullptr, nullptr, nullptr, w.E, (w.E + kBlock - 1) / kBlock, (w.E + segment - 1) / segment};
  int64_t bytes = 2 * kRows * from.Stride();
  static thread_local std::vector<Line> values, scales, excess;
  from.values = Room<int8_t>(values, tiles * bytes);
  from.scales = Room<float>(scales, tiles * from.blocks * kLanes);
  from.excess = Room<int32_t>(excess, tiles * from.segments * kLanes);
  ParallelFor(pool, tiles, [&](int64_t tile) {
    if (from.Stride() > w.E || T < (tile + 1) * kRows) std::memset(from.values + tile * bytes, 0, bytes);
    for (int64_t row = 0; row < std::min(kRows, T - tile * kRows); ++row) {
      ToIntegers(x + (tile * kRows + row) * w.E, from, tile, row, segment, Excess(form));
    }
  });
  int64_t groups = (w.N + kRows - 1) / kRows;
  // Several items a thread: one that begins late is not waited for long.
  int64_t items = std::clamp<int64_t>(8 * pool.num_threads(), 1, (groups + 3) / 4);
  ParallelFor(pool, items, [&](int64_t item) {
    MultiplyGroups<form, kind>(from, w, y, T, groups * item / items, groups * (item + 1) / items);
  });
}
}  // namespace

void MultiplyIntegers(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  WithKind(w, [&](auto is) { MultiplyAs<decltype(is)::form, decltype(is)::kind>(pool, x, w, y, T); });
}
}  // namespace jpaged
