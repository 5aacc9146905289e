// The registers of AVX-512 by the names that every level's lanes.h has (struct Lanes), and what the kernels of this level and
// of AMX share beside them: products of bf16 by vdpbf16ps, transposed tiles.
#pragma once

#include <immintrin.h>

#include "../quantized.h"

namespace jpaged::avx512 {

// 16 f32 in a register.
struct Lanes {
  static constexpr int64_t kCount = 16;
  using Floats = __m512;
  using Mask = __mmask16;

  static Floats Zero() { return _mm512_setzero_ps(); }
  static Floats Set(float x) { return _mm512_set1_ps(x); }
  static Floats Load(const float* from) { return _mm512_loadu_ps(from); }
  static void Store(float* to, Floats x) { _mm512_storeu_ps(to, x); }
  static Floats Add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
  static Floats Sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
  static Floats Mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats Div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
  static Floats Sqrt(Floats x) { return _mm512_sqrt_ps(x); }
  static Floats Max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
  static Floats Fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
  static void AddProduct(Floats& sum, Floats a, Floats b) { sum = Fma(a, b, sum); }
  static Floats Fnma(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b

  // y * 2^n where the mask is set, else 0; moved: n plus 1.5 * 2^23.
  static Floats TimesPower(Mask mask, Floats y, Floats moved) {
    return _mm512_maskz_scalef_ps(mask, y, _mm512_sub_ps(moved, _mm512_set1_ps(12582912.0f)));
  }

  // Where x is not below y, or is NaN.
  static Mask NotBelow(Floats x, Floats y) { return _mm512_cmp_ps_mask(x, y, _CMP_NLT_UQ); }

  static Floats OrZero(Mask mask, Floats x) { return _mm512_maskz_mov_ps(mask, x); }

  // a * b where the mask is set, else `other`.
  static Floats MulOr(Floats other, Mask mask, Floats a, Floats b) { return _mm512_mask_mul_ps(other, mask, a, b); }

  static float Sum(Floats x) { return _mm512_reduce_add_ps(x); }

  // Element i is the sum of the lanes of the i-th.
  static void PutSums(float* to, Floats a0, Floats a1, Floats a2, Floats a3) {
    to[0] = Sum(a0), to[1] = Sum(a1), to[2] = Sum(a2), to[3] = Sum(a3);
  }

  // The second half of the lanes is added to the first one until there is one.
  static float SumOfHalves(Floats x) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

  // Element i is that sum of the i-th.
  static void PutSumsOfHalves(float* to, Floats a0, Floats a1, Floats a2, Floats a3) {
    auto halves = [](Floats a, Floats b) { return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee)); };
    Floats eight = halves(a0, a1), others = halves(a2, a3);
    Floats four = _mm512_add_ps(_mm512_shuffle_f32x4(eight, others, 0x88), _mm512_shuffle_f32x4(eight, others, 0xdd));
    Floats two = _mm512_add_ps(four, _mm512_permute_ps(four, 0x4e));
    Floats one = _mm512_add_ps(two, _mm512_movehdup_ps(two));
    const __m512i firsts = _mm512_castsi128_si512(_mm_setr_epi32(0, 4, 8, 12));
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, one)));
  }

  static float Largest(Floats x) { return _mm512_reduce_max_ps(x); }

  static Floats FromBf16(const bf16* from) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16));
  }

  // 32 bf16 as numbers of even places and of odd ones.
  static void EvenOdd(const bf16* from, Floats& even, Floats& odd) {
    __m512i words = _mm512_loadu_si512(from);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(0xffff0000)));
  }

  // Rounds to the nearest bf16, the even one of two, what is no NaN, or a NaN that ends in 16 zeros, as those that come of bf16 do: that
  // one stays NaN. Unlike the instruction it keeps what is denormal.
  static Floats RoundedToBf16(Floats x) {
    return _mm512_castsi512_ps(_mm512_and_si512(Rounded(x), _mm512_set1_epi32(0xffff0000)));
  }
  static void PutRounded(bf16* to, Floats x) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32(Rounded(x), 16)));
  }

  // Writes 32 numbers of even places and of odd ones, rounded in the same way.
  static void PutRounded(bf16* to, Floats even, Floats odd) {
    _mm512_storeu_si512(to, _mm512_mask_mov_epi16(_mm512_srli_epi32(Rounded(even), 16), 0xaaaaaaaa, Rounded(odd)));
  }

  // Writes 32 numbers which bf16 holds.
  static void PutExact(bf16* to, Floats even, Floats odd) {
    __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_castps_si512(odd)));
  }

  // Puts numbers of even places and of odd ones in their order.
  static void InOrder(Floats even, Floats odd, Floats (&x)[2]) {
    const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    x[0] = _mm512_permutex2var_ps(even, first, odd);
    x[1] = _mm512_permutex2var_ps(even, _mm512_add_epi32(first, _mm512_set1_epi32(8)), odd);
  }

  // The other way round: takes numbers in their order apart.
  static void EvenOdd(Floats first, Floats second, Floats& even, Floats& odd) {
    const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = _mm512_permutex2var_ps(first, places, second);
    odd = _mm512_permutex2var_ps(first, _mm512_add_epi32(places, _mm512_set1_epi32(1)), second);
  }

  // Writes x rounded, and returns what was written.
  static Floats Put(bf16* to, Floats x) {
    __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
    _mm256_storeu_si256((__m256i*)to, rounded);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
  }

  // Numbers in [low, high), both in [0, 64].
  class Range {
   public:
    Range(int64_t low, int64_t high) : numbers_(Below(high) & ~Below(low)) {}
    Mask Lanes(int i) const { return numbers_ >> (kCount * i); }  // of lanes that are 16 i, 16 i + 1, ...

   private:
    static uint64_t Below(int64_t n) { return n == 64 ? ~0ull : (1ull << n) - 1; }
    uint64_t numbers_;
  };

 private:
  // The nearest bf16 in the upper half of each lane; of no NaN but those that RoundedToBf16 takes.
  static __m512i Rounded(Floats x) {
    __m512i bits = _mm512_castps_si512(x), rounded = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
    __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    return _mm512_mask_add_epi32(rounded, is_odd, bits, _mm512_set1_epi32(0x8000));
  }
};

// Weights, 32 at a time, as bf16; see bf16_weights.h.
struct Widener {
  // An f32 of such a number ends in 16 zeros, so that nothing is to be rounded: the upper halves of the even ones go beside those of
  // the odd ones. Rounding two registers to bf16 takes as long as four of these instructions.
  static void Exact(const int8_t* from, bf16* to) {
    __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)from));
    __m512i even = (__m512i)_mm512_cvtepi32_ps(_mm512_madd_epi16(words, _mm512_set1_epi32(1)));
    __m512i odd = (__m512i)_mm512_cvtepi32_ps(_mm512_madd_epi16(words, _mm512_set1_epi32(1 << 16)));
    _mm512_storeu_si512(to, _mm512_mask_alignr_epi8(odd, 0x3333333333333333, even, even, 2));
  }
  static void Scaled(const int8_t* from, float scale, bf16* to) {
    __m512 s = _mm512_set1_ps(scale);
    Put(to, _mm512_mul_ps(Floats(from), s), _mm512_mul_ps(Floats(from + 16), s));
  }

  static void Exact(const E4m3* from, bf16* to) {
    _mm512_storeu_si512(to, FromE4m3(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)from))));
  }
  static void Scaled(const E4m3* from, float scale, bf16* to) {
    __m512 s = _mm512_set1_ps(scale);
    bf16 exact[kPacked];
    Exact(from, exact);
    Put(to, _mm512_mul_ps(Lanes::FromBf16(exact), s), _mm512_mul_ps(Lanes::FromBf16(exact + 16), s));
  }

  // What the 16 values of int4 stand for, (value - zero) * scale: a look-up. The table has them twice, since the lower five bits
  // of a word count.
  class Int4 {
   public:
    Int4(float scale, float zero) {
      const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
      __m512 scaled = _mm512_mul_ps(_mm512_sub_ps(values, _mm512_set1_ps(zero)), _mm512_set1_ps(scale));
      table_ = (__m512i)_mm512_cvtne2ps_pbh(scaled, scaled);
    }

    void Put(const uint8_t* from, bf16* to) const {
      const __m256i lower_and_upper = _mm256_setr_epi64x(0, 0, 4, 4);
      __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)from));
      __m512i index = _mm512_cvtepu8_epi16(_mm256_srlv_epi64(bytes, lower_and_upper));
      _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, table_));
    }

   private:
    __m512i table_;
  };

  // Bytes of e4m3, each in a word of 16 bits, as bf16: exponent and mantissa in their places; those below the normal ones,
  // eighths of the least one, are looked up by the lowest 5 bits.
  static __m512i FromE4m3(__m512i words) {
    const __m512i below = _mm512_castsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i size = _mm512_and_si512(_mm512_slli_epi16(words, 4), _mm512_set1_epi16(0x7f << 4));
    __m512i normal = _mm512_add_epi16(size, _mm512_set1_epi16((127 - 7) << 7));
    __mmask32 is_below = _mm512_testn_epi16_mask(words, _mm512_set1_epi16(0x78));
    __m512i value = _mm512_mask_permutexvar_epi16(normal, is_below, words, below);
    __m512i sign = _mm512_and_si512(_mm512_slli_epi16(words, 8), _mm512_set1_epi16(static_cast<short>(0x8000)));
    return _mm512_or_si512(value, sign);
  }

  // Writes both rounded, one after the other.
  static void Put(bf16* to, __m512 low, __m512 high) { _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high, low)); }

  static __m512 Floats(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
  }
};

inline __m512bh LoadBf16(const void* from) { return (__m512bh)_mm512_loadu_si512(from); }

inline void PutRounded(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(x)); }

// Rounds 32 numbers of which `low` has those that unpacking their words puts first, and writes them in their own order.
inline void PutUnpacked(bf16* to, __m512 low, __m512 high) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // of four numbers each
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(order, (__m512i)_mm512_cvtne2ps_pbh(high, low)));
}

// Two bf16 in all lanes.
inline __m512bh PairOfBf16(const bf16* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof(pair));
  return (__m512bh)_mm512_set1_epi32(pair);
}

// Element i is the sum of the lanes of a[i].
inline __m512 Sums(const __m512 (&a)[16]) {
  __m512 t[8], u[4], v[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512d x = _mm512_castps_pd(t[2 * i]), y = _mm512_castps_pd(t[2 * i + 1]);
    u[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    __m512 x = u[2 * i], y = u[2 * i + 1];
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
  return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

// Calls put(j, the word j of each x[i]), for 16 x 16 words.
template <typename Put>
inline void Transpose(__m512i (&x)[16], const Put& put) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      x[4 * i + 2 * half] = _mm512_unpacklo_epi64(t[4 * i + half], t[4 * i + half + 2]);
      x[4 * i + 2 * half + 1] = _mm512_unpackhi_epi64(t[4 * i + half], t[4 * i + half + 2]);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {  // quarter n of x[4i + j] is column 4n + j of rows 4i to 4i + 3
    __m512i a = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88), b = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    __m512i c = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd), d = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
    put(j, _mm512_shuffle_i32x4(a, b, 0x88));
    put(4 + j, _mm512_shuffle_i32x4(c, d, 0x88));
    put(8 + j, _mm512_shuffle_i32x4(a, b, 0xdd));
    put(12 + j, _mm512_shuffle_i32x4(c, d, 0xdd));
  }
}

inline void Transpose(__m512i (&x)[16], bf16* out, int64_t stride) {
  Transpose(x, [&](int64_t j, __m512i words) { _mm512_storeu_si512(out + j * stride, words); });
}

// Register i has four words of the rows i, 4 + i, 8 + i and 12 + i of 16, which begin at row(0) to row(15). Lanes are put together
// as they are loaded: that takes none of the shuffles, of which a core has one a cycle.
template <typename Row>
inline void LoadLanes(const Row& row, __m512i (&x)[4]) {
  auto lane = [&](int64_t i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row(i))); };
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm512_castsi128_si512(lane(i));
    x[i] = _mm512_mask_broadcast_i32x4(x[i], 0x00f0, lane(4 + i));
    x[i] = _mm512_mask_broadcast_i32x4(x[i], 0x0f00, lane(8 + i));
    x[i] = _mm512_mask_broadcast_i32x4(x[i], 0xf000, lane(12 + i));
  }
}

// Calls put(j, the word j of each of 16 rows) for the four words of a row that LoadLanes loads: a quarter of 16 x 16 words.
template <typename Put>
inline void TransposeLanes(const __m512i (&x)[4], const Put& put) {
  __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
  __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
  put(0, _mm512_unpacklo_epi64(a, c)), put(1, _mm512_unpackhi_epi64(a, c));
  put(2, _mm512_unpacklo_epi64(b, d)), put(3, _mm512_unpackhi_epi64(b, d));
}

// out[j] = the eight bytes from 8 j on of each x[i].
inline void Transpose(const __m512i (&x)[8], __m512i (&out)[8]) {
  __m512i t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {  // quarter n: piece 2n of two rows; piece 2n + 1
    t[i] = _mm512_unpacklo_epi64(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi64(x[i], x[i + 1]);
  }
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; ++odd) {
    __m512i a = _mm512_shuffle_i64x2(t[odd], t[2 + odd], 0x44), b = _mm512_shuffle_i64x2(t[4 + odd], t[6 + odd], 0x44);
    __m512i c = _mm512_shuffle_i64x2(t[odd], t[2 + odd], 0xee), d = _mm512_shuffle_i64x2(t[4 + odd], t[6 + odd], 0xee);
    out[odd] = _mm512_shuffle_i64x2(a, b, 0x88);
    out[2 + odd] = _mm512_shuffle_i64x2(a, b, 0xdd);
    out[4 + odd] = _mm512_shuffle_i64x2(c, d, 0x88);
    out[6 + odd] = _mm512_shuffle_i64x2(c, d, 0xdd);
  }
}

}  // namespace jpaged::avx512
