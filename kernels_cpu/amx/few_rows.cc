// Products of few rows of x with weights in 8 bits by f32 multiply-adds that have the bits of AMX's tiles. One row of x would leave
// 15 of 16 columns of a tile empty, and the weight would have to become bf16 in memory first.
//
// TDPBF16PS sums the even ones of 32 inputs apart from the odd ones, one after another from zero on; both sums are added, and then
// to what the tile held. It rounds to the nearest, and takes and makes zeros for denormal numbers. Here a lane of a register is one
// of 16 rows of the weight, so that its inputs come one after another as well.
#include "few_rows.h"

#include <immintrin.h>

#include "../avx512/lanes.h"
#include "tiles.h"

namespace jpaged::amx {
namespace {

constexpr int64_t kMostRows = 3;     // for more of them tiles are as fast
constexpr int64_t kLeastGroups = 8;  // of 16 rows of the weight in an item

// A signed byte of words as f32. The instruction adds up the products of four bytes, of which all but one are with zero: shifting
// takes one more.
inline __m512 FromByte(__m512i words, int byte) {
  return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi32(1 << 8 * byte), words));
}

// sums[r][i] of kRows rows of x [kRows, E] and 16 rows of the weight from n on.
template <int kRows>
[[gnu::noinline]] void MultiplySixteen(const float* x, const Quantized& w, int64_t n, float (*sums)[kSide]) {
  const uint8_t* rows[kSide];
  for (int64_t i = 0; i < kSide; ++i) rows[i] = w.Row(std::min(n + i, w.N - 1));
  const uint8_t* next = w.Row(n + kSide);  // comes towards the cache in the order in which it lies, a line beside each 4 inputs
  __m512 totals[kRows];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) totals[r] = _mm512_setzero_ps();
  for (int64_t e = 0; e < w.E; e += kDepth) {
    __m512 even[kRows], odd[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) even[r] = odd[r] = _mm512_setzero_ps();
#pragma GCC unroll 2
    for (int64_t half = 0; half < kDepth; half += kDepth / 2) {
      __m512i lanes[4], words[4];
      avx512::LoadLanes([&](int64_t i) { return rows[i] + e + half; }, lanes);
      avx512::TransposeLanes(lanes, [&](int64_t i, __m512i word) { words[i] = word; });
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; ++i, next += kCacheLine) {
        PrefetchL2(next);
        __m512 inputs[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) inputs[j] = FromByte(words[i], j);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const float* from = x + r * w.E + e + half + 4 * i;
          even[r] = _mm512_fmadd_ps(inputs[0], _mm512_set1_ps(from[0]), even[r]);
          odd[r] = _mm512_fmadd_ps(inputs[1], _mm512_set1_ps(from[1]), odd[r]);
          even[r] = _mm512_fmadd_ps(inputs[2], _mm512_set1_ps(from[2]), even[r]);
          odd[r] = _mm512_fmadd_ps(inputs[3], _mm512_set1_ps(from[3]), odd[r]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) totals[r] = _mm512_add_ps(totals[r], _mm512_add_ps(even[r], odd[r]));
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) _mm512_store_ps(sums[r], totals[r]);
}

inline void Put(float* to, __mmask16 mask, __m512 y) { _mm512_mask_storeu_ps(to, mask, y); }
inline void Put(bf16* to, __mmask16 mask, __m512 y) { _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh(y)); }

template <typename Out>
void MultiplyTo(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Out* y, int64_t T) {
  constexpr decltype(&MultiplySixteen<1>) kByRows[kMostRows] = {&MultiplySixteen<1>, &MultiplySixteen<2>, &MultiplySixteen<3>};
  static thread_local Memory of_x;
  float* values = Scratch<float>(of_x, T * w.E);
  for (int64_t i = 0; i < T * w.E; i += kSide) {
    __m256i from = _mm256_loadu_si256((const __m256i*)(x + i));
    _mm512_store_si512(values + i, _mm512_slli_epi32(_mm512_cvtepu16_epi32(from), 16));
  }
  int64_t groups = (w.N + kSide - 1) / kSide, items = SharesOf(pool, groups, kLeastGroups);
  ParallelFor(pool, items, [&](int64_t item) {
    static thread_local Memory memory;
    int64_t begin = groups * item / items, end = groups * (item + 1) / items;
    auto* sums = reinterpret_cast<float(*)[kSide]>(Scratch<float>(memory, (end - begin) * T * kSide));
    {
      FlushDenormals in_this_thread;
      for (int64_t group = begin; group < end; ++group) kByRows[T - 1](values, w, group * kSide, sums + (group - begin) * T);
    }
    for (int64_t group = begin; group < end; ++group) {
      int64_t n = group * kSide;
      __mmask16 mask = (1u << std::min(kSide, w.N - n)) - 1;
      __m512 scales = _mm512_maskz_loadu_ps(mask, w.scales + n);
      for (int64_t t = 0; t < T; ++t) {
        Put(y + t * w.N + n, mask, _mm512_mul_ps(_mm512_load_ps(sums[(group - begin) * T + t]), scales));
      }
    }
  });
}
}  // namespace

int64_t MostFewRows(const Quantized& w) { return w.form == Form::kInt8 && w.Kind() == Scales::kRow ? kMostRows : 0; }

void MultiplyFewRows(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) { MultiplyTo(pool, x, w, y, T); }

void MultiplyFewRows(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, bf16* y, int64_t T) { MultiplyTo(pool, x, w, y, T); }

}  // namespace jpaged::amx
