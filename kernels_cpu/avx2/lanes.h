// What the kernels for AVX2 share: 16 bf16 become two registers of f32, those in even places and those in odd ones, each by
// one instruction. Sums over them run in that order.
#pragma once

#include <cstring>

#include "../kernels.h"

namespace jpaged {

constexpr int64_t kLanes = 8;  // f32 in a register

inline __m256i Words(const bf16* at) { return _mm256_loadu_si256((const __m256i*)at); }
inline __m256 Even(__m256i words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); }
inline __m256 Odd(__m256i words) {
  return _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// Element i is the sum of the lanes of a[i].
inline __m128 Sums(__m256 a0, __m256 a1, __m256 a2, __m256 a3) {
  __m256 t = _mm256_hadd_ps(_mm256_hadd_ps(a0, a1), _mm256_hadd_ps(a2, a3));
  return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

// In the upper half of each word, the nearest bf16, the even one of two; NaN stays NaN.
inline __m256i Rounded(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}

}  // namespace jpaged
