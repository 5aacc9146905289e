// Products with weights in 8 and 4 bits with AMX; see quantized.h. A few rows of the weight at a time become bf16 in the cache
// and meet all rows of x there: those of one scale as they are, which bf16 holds, others times their scales, rounded.
#include "../quantized.h"

#include "../avx512/lanes.h"
#include "operand.h"

namespace jpaged {
namespace {

constexpr int64_t kLine = 64;  // bytes in a cache line

// 32 f32 as bf16, to the nearest, the even one of two.
inline void PutRounded(__m512 low, __m512 high, bf16* to) {
  _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(low));
  _mm256_storeu_si256((__m256i*)(to + 16), (__m256i)_mm512_cvtneps_pbh(high));
}

inline __m512 Numbers(const int8_t* at) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)at)));
}

// Of e4m3: as f16 they are a 256th, whose exponent has a bit more, so that those below the normal ones come right.
inline __m512 Numbers(const uint8_t* at) {
  __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at)), 8);
  __m256i half = _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}

// 32 values as they are, which bf16 holds.
inline void PutExact(const int8_t* from, bf16* to) { PutRounded(Numbers(from), Numbers(from + 16), to); }

// Of e4m3: exponent and mantissa in their places; those below the normal ones, eighths of the least one, are looked up.
inline void PutExact(const uint8_t* from, bf16* to) {
  const __m512i below = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from));
  __m512i size = _mm512_and_si512(words, _mm512_set1_epi16(0x7f));
  __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16((127 - 7) << 7));
  __mmask32 is_below = _mm512_testn_epi16_mask(size, _mm512_set1_epi16(0x78));
  __m512i value = _mm512_mask_permutexvar_epi16(normal, is_below, size, below);
  __m512i sign = _mm512_and_si512(_mm512_slli_epi16(words, 8), _mm512_set1_epi16(static_cast<short>(0x8000)));
  _mm512_storeu_si512(to, _mm512_or_si512(value, sign));
}

// `groups` neighbours of `group` values each, times their scales; scales null is as they are.
template <typename Byte>
void Widen(const Byte* from, const float* scales, int64_t groups, int64_t group, bf16* to) {
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < group; i += kPacked, from += kPacked, to += kPacked) {
      if (scales == nullptr) {
        PutExact(from, to);
      } else {
        __m512 scale = _mm512_set1_ps(scales[g]);
        PutRounded(_mm512_mul_ps(Numbers(from), scale), _mm512_mul_ps(Numbers(from + 16), scale), to);
      }
    }
  }
}

// A byte holds the values i and i + 16 of its 32, each 8 more than it is: a look-up in what the 16 stand for.
void WidenInt4(const uint8_t* from, const float* scales, const float* zeros, int64_t groups, int64_t group, bf16* to) {
  const __m512 all = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m128i four = _mm_set1_epi8(15);
  for (int64_t g = 0; g < groups; ++g) {
    __m512 values = zeros == nullptr ? all : _mm512_sub_ps(all, _mm512_set1_ps(zeros[g]));
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(values, _mm512_set1_ps(scales[g])));
    __m512i table = _mm512_castsi256_si512(rounded);
    for (int64_t i = 0; i < group; i += kPacked, from += kPacked / 2, to += kPacked) {
      __m128i bytes = _mm_loadu_si128((const __m128i*)from);
      __m256i low = _mm256_cvtepu8_epi16(_mm_and_si128(bytes, four));
      __m256i high = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(bytes, 4), four));
      __m512i at = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(at, table));
    }
  }
}

// Rows [first, first + count) of w as bf16.
void WidenRows(const Quantized& w, int64_t first, int64_t count, bf16* out) {
  const float* scales = w.IsByRow() ? nullptr : w.scales + first * w.S;
  if (w.form == Form::kInt4) {
    const float* zeros = w.zeros == nullptr ? nullptr : w.zeros + first * w.S;
    WidenInt4(static_cast<const uint8_t*>(w.values) + first * w.E / 2, scales, zeros, count * w.S, w.E / w.S, out);
  } else if (w.form == Form::kInt8) {
    Widen(static_cast<const int8_t*>(w.values) + first * w.E, scales, count * w.S, w.E / w.S, out);
  } else {
    Widen(static_cast<const uint8_t*>(w.values) + first * w.E, scales, count * w.S, w.E / w.S, out);
  }
}

// Brings rows [first, first + count) of w towards the cache.
void Fetch(const Quantized& w, int64_t first, int64_t count) {
  int64_t row = w.form == Form::kInt4 ? w.E / 2 : w.E;
  const char* from = static_cast<const char*>(w.values) + first * row;
  for (int64_t at = 0; at < count * row; at += kLine) _mm_prefetch(from + at, _MM_HINT_T1);
}
}  // namespace

void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  Operand operand(pool, x, T, w.E);
  int64_t at_once = operand.AtOnce(), blocks = (w.N + at_once - 1) / at_once;
  // Several items a thread: one that begins late is not waited for long.
  int64_t items = std::min(blocks, 8 * pool.num_threads());
  ParallelFor(pool, items, [&](int64_t item) {
    static thread_local std::vector<Line> memory;
    bf16* rows = Room<bf16>(memory, at_once * w.E);
    for (int64_t block = blocks * item / items; block < blocks * (item + 1) / items; ++block) {
      int64_t n = block * at_once, here = std::min(at_once, w.N - n);
      float* to = y + n;
      WidenRows(w, n, here, rows);
      Fetch(w, n + here, std::min(at_once, w.N - n - here));
      operand.Multiply(rows, here, to, w.N);
      if (!w.IsByRow()) continue;
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t i = 0; i < here; ++i) to[t * w.N + i] *= w.scales[n + i];
      }
    }
  });
}
}  // namespace jpaged
