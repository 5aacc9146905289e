// Products with weights of int8 and int4 in integers, of which AVX2 multiplies twice as many at a time as f32; see
// integers.h. 64 inputs are taken at a time, in four registers of 16-bit words, x in the order in which that form's weights
// are widened most cheaply. Of one row of x, weights meet it in registers, an output after another, as memory gives them
// fastest. Of more, 4 outputs' are widened into the L1 cache, once for all rows. Sums of integers are exact and those in f32
// run in one order either way.
#include "../integers.h"

#include <cstring>
#include <memory>

#include "lanes.h"

namespace jpaged {
namespace {

constexpr int64_t kRows = 2, kCols = 4;      // of a tile
constexpr int64_t kWords = 16;               // in a register
constexpr int64_t kChunk = 64;               // inputs that are taken at a time
constexpr int64_t kBlock = 256;              // inputs that share a scale of x: 2^15 * 2^7 * 256 / 8 fit into 31 bits
constexpr int64_t kPanelBytes = 256 * 1024;  // of x that stays in the L2 cache
constexpr int64_t kMostRows = 64;            // of x at a time
constexpr int64_t kLine = 64;                // bytes in a cache line
constexpr int64_t kAhead = 2048;             // bytes of weights that are asked for before one row of x needs them
constexpr float kMost = 32767.0f;
constexpr float kNothing = 1e-30f;  // what is below is zero: its scale would have no inverse

using Int = int16_t;

// An output's weights, and how their integers become numbers.
struct Row {
  const uint8_t* values;
  const float *scales, *zeros;
};

template <Form form>
constexpr int64_t Bytes(int64_t inputs) {
  return form == Form::kInt4 ? inputs / 2 : inputs;
}

// Where in the four registers an input of 64 is. Of scales of groups the halves of each register are of 32 inputs each, so
// that a half has one scale.
template <Form form, Scales kind>
constexpr int64_t Place(int64_t i) {
  if (kind == Scales::kRow) return i;
  int64_t half = i / kPacked, at = i % kPacked;
  if (form == Form::kInt8) return at / 8 * kWords + 8 * half + at % 8;
  // A word has four weights, of the places 2i, 16 + 2i, 2i + 1 and 17 + 2i in their 32.
  return (2 * (at % 2) + at / 16) * kWords + 8 * half + at % 16 / 2;
}

// 64 weights as they lie, or the 32 at a row's end, as integers.
template <Form form, Scales kind>
inline void Widen(const uint8_t* at, bool is_half, __m256i (&out)[4]) {
  auto load = [](const uint8_t* from) { return _mm_loadu_si128((const __m128i*)from); };
  if constexpr (form == Form::kInt4) {
    __m256i words = is_half ? _mm256_zextsi128_si256(load(at)) : _mm256_loadu_si256((const __m256i*)at);
    __m256i four = _mm256_set1_epi16(15), eight = _mm256_set1_epi16(8);
    out[0] = _mm256_sub_epi16(_mm256_and_si256(words, four), eight);
    out[1] = _mm256_sub_epi16(_mm256_and_si256(_mm256_srli_epi16(words, 4), four), eight);
    out[2] = _mm256_sub_epi16(_mm256_and_si256(_mm256_srli_epi16(words, 8), four), eight);
    out[3] = _mm256_sub_epi16(_mm256_srli_epi16(words, 12), eight);
  } else if constexpr (kind == Scales::kRow) {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      out[k] = is_half && k > 1 ? _mm256_setzero_si256() : _mm256_cvtepi8_epi16(load(at + kWords * k));
    }
  } else {
#pragma GCC unroll 2
    for (int k = 0; k < 4; k += 2) {
      __m128i one = load(at + 8 * k), other = is_half ? _mm_setzero_si128() : load(at + kPacked + 8 * k);
      out[k] = _mm256_cvtepi8_epi16(_mm_unpacklo_epi64(one, other));
      out[k + 1] = _mm256_cvtepi8_epi16(_mm_unpackhi_epi64(one, other));
    }
  }
}

// x as integers, [T, E in whole 64s] with zeros at the end, times scales, [T, blocks].
struct Integers {
  Int* values;
  float* scales;
  int64_t E, blocks;

  int64_t Stride() const { return (E + kChunk - 1) / kChunk * kChunk; }
  Integers From(int64_t t) const { return {values + t * Stride(), scales + t * blocks, E, blocks}; }
};

// A row of x in blocks, each in steps of a 32767th of the largest. NaN or infinity makes a block's scale so.
template <Form form, Scales kind>
void ToIntegers(const bf16* x, int64_t E, Int* to, float* scales) {
  alignas(32) Int some[kChunk] = {};
  for (int64_t first = 0; first < E; first += kBlock) {
    int64_t end = std::min(E, first + kBlock);
    __m256i most = _mm256_setzero_si256();
    for (int64_t e = first; e < end; e += kWords) {  // of bits without a sign the larger number has the larger, NaN the largest
      most = _mm256_max_epu16(most, _mm256_and_si256(Words(x + e), _mm256_set1_epi16(0x7fff)));
    }
    alignas(32) uint16_t each[kWords];
    _mm256_store_si256((__m256i*)each, most);
    uint32_t bits = *std::max_element(each, each + kWords) << 16;
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    bool is_zero = largest < kNothing;
    *scales++ = is_zero ? 0.0f : largest / kMost;
    __m256 inverse = _mm256_set1_ps(is_zero ? 0.0f : kMost / largest);
    for (int64_t at = first; at < end; at += kChunk) {
      int64_t inputs = std::min(kChunk, end - at);
      for (int64_t e = 0; e < inputs; e += kWords) {
        __m256i words = Words(x + at + e);
        __m256i even = _mm256_cvtps_epi32(_mm256_mul_ps(Even(words), inverse));
        __m256i odd = _mm256_cvtps_epi32(_mm256_mul_ps(Odd(words), inverse));
        _mm256_store_si256((__m256i*)(some + e), _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xaa));
      }
      for (int64_t i = 0; i < kChunk; ++i) to[at + Place<form, kind>(i)] = i < inputs ? some[i] : 0;
    }
  }
}

// Where the weights of an output from input e of a block on come from: widened here, or before.
template <Form form, Scales kind>
struct AsTheyLie {
  const uint8_t* values;
  void Get(int64_t e, int, bool is_half, __m256i (&out)[4]) const {
    const uint8_t* at = values + Bytes<form>(e);
    _mm_prefetch((const char*)at + kAhead, _MM_HINT_T0);
    Widen<form, kind>(at, is_half, out);
  }
};

struct Widened {
  const Int* block;  // [inputs / 64][4][64]
  void Get(int64_t e, int j, bool, __m256i (&out)[4]) const {
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) out[k] = _mm256_load_si256((const __m256i*)(block + e * kCols + j * kChunk + k * kWords));
  }
};

// Adds the products of R rows of x and C outputs over one block's inputs, which begin with input `first`, to their sums,
// [R][4][8]. group: inputs of a scale of w, in whole 32s.
template <int R, int C, Scales kind, typename Weights>
inline void Tile(const Integers& x, int64_t first, int64_t depth, const Weights& weights, const Row* w, int64_t group, float* sums) {
  __m256 acc[R][C];
  __m256i whole[R][C];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) acc[r][j] = _mm256_setzero_ps(), whole[r][j] = _mm256_setzero_si256();
  }
  int64_t stride = x.Stride();
  const Int* from = x.values + first;
  auto numbers = [&](int r, int64_t e, int k) { return _mm256_load_si256((const __m256i*)(from + r * stride + e + k * kWords)); };
  int64_t g = first / group, next = (g + 1) * group - first;
  auto both = [](const float* of, int64_t one, int64_t other) {
    return _mm256_blend_ps(_mm256_broadcast_ss(of + one), _mm256_broadcast_ss(of + other), 0xf0);
  };
  for (int64_t e = 0; e < depth; e += kChunk) {
    bool is_half = depth - e < kChunk;
    int64_t one = g, other = g;
    if constexpr (kind != Scales::kRow) {  // of the first 32 inputs and of the last
      if (e == next) one = other = ++g, next += group;
      if (e + kPacked == next && !is_half) other = ++g, next += group;
    }
    __m256 all[R];
    if constexpr (kind == Scales::kZeros) {
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        __m256i sum = _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(numbers(r, e, k), _mm256_set1_epi16(1)));
        all[r] = _mm256_cvtepi32_ps(sum);
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) {
      __m256i b[4];
      weights.Get(e, j, is_half, b);
      // Or compilers load them once a row, and loads are what the tile would wait for.
      asm("" : "+x"(b[0]), "+x"(b[1]), "+x"(b[2]), "+x"(b[3]));
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) {
        __m256i sum = kind == Scales::kRow ? whole[r][j] : _mm256_setzero_si256();
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(numbers(r, e, k), b[k]));
        if constexpr (kind == Scales::kRow) {
          whole[r][j] = sum;
        } else {
          __m256 number = _mm256_cvtepi32_ps(sum);
          if constexpr (kind == Scales::kZeros) number = _mm256_fnmadd_ps(both(w[j].zeros, one, other), all[r], number);
          acc[r][j] = _mm256_fmadd_ps(number, both(w[j].scales, one, other), acc[r][j]);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    __m256 scale = _mm256_broadcast_ss(x.scales + r * x.blocks + first / kBlock);
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) {
      float* at = sums + (r * kCols + j) * kLanes;
      __m256 block = kind == Scales::kRow ? _mm256_cvtepi32_ps(whole[r][j]) : acc[r][j];
      _mm256_storeu_ps(at, _mm256_fmadd_ps(block, scale, _mm256_loadu_ps(at)));
    }
  }
}

// The sums of one row of x and 4 of w, [4][8].
template <Form form, Scales kind>
void OneRow(const Integers& x, const Row (&w)[kCols], int64_t group, float* sums) {
  for (int64_t j = 0; j < kCols; ++j) {
    for (int64_t first = 0; first < x.E; first += kBlock) {
      AsTheyLie<form, kind> weights{w[j].values + Bytes<form>(first)};
      Tile<1, 1, kind>(x, first, std::min(kBlock, x.E - first), weights, w + j, group, sums + j * kLanes);
    }
  }
}

// The sums of T rows of x, [T][4][8]. `ahead`: bytes from a row of w to what comes next of it.
template <Form form, Scales kind>
void SomeRows(const Integers& x, int64_t T, const Row (&w)[kCols], int64_t group, int64_t ahead, float* sums) {
  alignas(32) Int block[kBlock * kCols];
  for (int64_t first = 0; first < x.E; first += kBlock) {
    int64_t depth = std::min(kBlock, x.E - first), at = Bytes<form>(first);
    for (int64_t e = 0; e < depth; e += kChunk) {
      for (int64_t j = 0; j < kCols; ++j) {
        __m256i out[4];
        Widen<form, kind>(w[j].values + at + Bytes<form>(e), depth - e < kChunk, out);
        for (int k = 0; k < 4; ++k) _mm256_store_si256((__m256i*)(block + e * kCols + j * kChunk + k * kWords), out[k]);
      }
    }
    // What comes next of w comes from memory meanwhile.
    int64_t lines = kCols * ((Bytes<form>(depth) + kLine - 1) / kLine), tiles = (T + kRows - 1) / kRows, fetched = 0;
    for (int64_t t = 0; t < T; t += kRows) {
      for (int64_t upto = lines * (t / kRows + 1) / tiles; fetched < upto; ++fetched) {
        _mm_prefetch((const char*)w[fetched % kCols].values + at + fetched / kCols * kLine + ahead, _MM_HINT_T1);
      }
      Integers rows = x.From(t);
      if (T - t >= kRows) {
        Tile<kRows, kCols, kind>(rows, first, depth, Widened{block}, w, group, sums + t * kCols * kLanes);
      } else {
        Tile<1, kCols, kind>(rows, first, depth, Widened{block}, w, group, sums + t * kCols * kLanes);
      }
    }
  }
}

// One thread's part: the groups [begin, end) of 4 outputs for all rows of x.
template <Form form, Scales kind>
void MultiplyGroups(const Integers& x, const Quantized& w, float* y, int64_t T, int64_t begin, int64_t end) {
  int64_t panel = std::clamp<int64_t>(kPanelBytes / (2 * w.E) / kRows * kRows, 16, kMostRows);
  int64_t row_bytes = Bytes<form>(w.E);
  alignas(32) float sums[kMostRows * kCols * kLanes];
  for (int64_t t = 0; t < T; t += panel) {
    int64_t rows = std::min(panel, T - t);
    Integers some = x.From(t);
    for (int64_t n = begin * kCols; n < std::min(w.N, end * kCols); n += kCols) {
      int64_t cols = std::min(kCols, w.N - n);
      Row from[kCols];  // the last one again where there are no more
      for (int64_t j = 0; j < kCols; ++j) {
        int64_t row = n + std::min(j, cols - 1);
        from[j] = {static_cast<const uint8_t*>(w.values) + row * row_bytes, w.scales + row * w.S,
                   w.zeros == nullptr ? nullptr : w.zeros + row * w.S};
      }
      std::memset(sums, 0, rows * kCols * kLanes * sizeof(float));
      if (rows == 1) {
        OneRow<form, kind>(some, from, w.E / w.S, sums);
      } else {
        SomeRows<form, kind>(some, rows, from, w.E / w.S, kCols * row_bytes, sums);
      }
      for (int64_t r = 0; r < rows; ++r) {
        __m256 acc[kCols];
        for (int64_t j = 0; j < kCols; ++j) acc[j] = _mm256_load_ps(sums + (r * kCols + j) * kLanes);
        float found[kCols];
        _mm_storeu_ps(found, Sums(acc[0], acc[1], acc[2], acc[3]));
        for (int64_t j = 0; j < cols; ++j) {
          y[(t + r) * w.N + n + j] = kind == Scales::kRow ? found[j] * from[j].scales[0] : found[j];
        }
      }
    }
  }
}

template <Form form, Scales kind>
void MultiplyAs(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  int64_t blocks = (w.E + kBlock - 1) / kBlock, stride = (w.E + kChunk - 1) / kChunk * kChunk;
  std::unique_ptr<__m256i[]> values(new __m256i[T * stride / kWords]);
  std::unique_ptr<float[]> scales(new float[T * blocks]);
  Integers from{reinterpret_cast<Int*>(values.get()), scales.get(), w.E, blocks};
  constexpr int64_t kAtOnce = 16;  // rows of x that are worth a thread
  ParallelFor(pool, (T + kAtOnce - 1) / kAtOnce, [&](int64_t item) {
    for (int64_t t = item * kAtOnce; t < std::min(T, (item + 1) * kAtOnce); ++t) {
      Integers row = from.From(t);
      ToIntegers<form, kind>(x + t * w.E, w.E, row.values, row.scales);
    }
  });
  int64_t groups = (w.N + kCols - 1) / kCols;
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
