// The activation of gates in registers of 512 bits, with the bits of mlp.h's, of which compilers make twice as many instructions, on
// registers of 256.
#pragma once

#include <immintrin.h>

#include "../mlp.h"

namespace jpaged::avx512 {

// See jpaged::Sigmoid. Where a product is a whole number of few bits, one fused instruction rounds as the two do that are written there.
inline __m512 Sigmoid(__m512 u) {
  auto set = [](float value) { return _mm512_set1_ps(value); };
  auto times_plus = [](__m512 y, __m512 r, __m512 added) { return _mm512_add_ps(_mm512_mul_ps(y, r), added); };
  const __m512i sign = _mm512_set1_epi32(INT32_MIN), least = _mm512_castps_si512(set(-87.0f));
  __m512 x = _mm512_castsi512_ps(_mm512_min_epu32(_mm512_or_si512(_mm512_castps_si512(u), sign), least));
  __m512 n = _mm512_sub_ps(times_plus(x, set(1.44269504f), set(12582912.0f)), set(12582912.0f));
  __m512 r = _mm512_sub_ps(_mm512_fnmadd_ps(n, set(0.693359375f), x), _mm512_mul_ps(n, set(-2.12194440e-4f)));
  __m512 y = set(1.9875691500e-4f);
  y = times_plus(y, r, set(1.3981999507e-3f)), y = times_plus(y, r, set(8.3334519073e-3f)), y = times_plus(y, r, set(4.1665795894e-2f));
  y = times_plus(y, r, set(1.6666665459e-1f)), y = times_plus(y, r, set(5.0000001201e-1f));
  y = times_plus(y, _mm512_mul_ps(r, r), _mm512_add_ps(r, set(1.0f)));
  __m512 e = _mm512_scalef_ps(y, n);
  __mmask16 is_below = _mm512_movepi32_mask(_mm512_castps_si512(u));
  return _mm512_div_ps(_mm512_mask_mov_ps(set(1.0f), is_below, e), _mm512_add_ps(set(1.0f), e));
}

template <Activation kind>
inline __m512 Gated(__m512 gate, __m512 up) {
  __m512 u = gate;
  if constexpr (kind == Activation::kGeluTanh) {
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(gate, gate), gate);
    u = _mm512_mul_ps(_mm512_set1_ps(1.59576912f), _mm512_add_ps(gate, _mm512_mul_ps(_mm512_set1_ps(0.044715f), cube)));
  }
  return _mm512_mul_ps(_mm512_mul_ps(gate, Sigmoid(u)), up);
}

}  // namespace jpaged::avx512
