// What the kernels for AVX-512 bf16, and for AMX beside it, share.
#pragma once

#include "../kernels.h"

namespace jpaged {

inline __m512bh Load(const void* at) { return (__m512bh)_mm512_loadu_si512(at); }

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

// put(j, of each x[i] the word j), for 16 x 16 words.
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

// out[j] = of each x[i] its eight bytes from 8 j on.
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

}  // namespace jpaged
