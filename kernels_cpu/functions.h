// Functions of numbers in f32. Every step is rounded as it is written here, the same on every level, so the bits of a result depend on
// its number alone. Those of XLA do not: where its compiler joins a product and a sum, they are rounded once, and it chooses that by
// the shape of the loop around them.
#pragma once

#include <limits>

#include "kernels.h"

namespace jpaged {

enum class Function { kExp, kSigmoid, kSilu, kSoftplus, kGeluTanh };

// Returns e^x to 2 units in the last place, x in [-87, 88], as Cephes' expf does; NaN of NaN.
inline float ExpWithin(float x) {
  float moved = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23, whose last bits are whole numbers
  float n = moved - 12582912.0f, r = x - n * 0.693359375f - n * -2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f, y = y * r + 8.3334519073e-3f, y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f, y = y * r + 5.0000001201e-1f, y = y * (r * r) + (r + 1.0f);
  return y * FromBits((BitsOf(moved) << 23) + (127u << 23));  // times 2^n
}

// Returns e^x: 0 below -87, infinity above 88.
inline float Exp(float x) {
  if (x < -87.0f) return 0.0f;
  return x > 88.0f ? std::numeric_limits<float>::infinity() : ExpWithin(x);
}

// Returns 1 / (1 + e^-u) to 4 units in the last place, below -87 that of -87; any number of NaN. Bits choose what is chosen:
// compilers make no registers of a loop that compares.
inline float Sigmoid(float u) {
  const uint32_t most = 0x42ae0000;  // 87
  uint32_t size = BitsOf(u) & 0x7fffffff, is_below = 0u - (BitsOf(u) >> 31);
  float e = ExpWithin(-FromBits(size < most ? size : most));
  return FromBits((BitsOf(e) & is_below) | (BitsOf(1.0f) & ~is_below)) / (1.0f + e);
}

// Returns u of gelu_tanh(x) = x / 2 * (1 + tanh(u / 2)) = x * Sigmoid(u).
inline float GeluArgument(float x) { return 1.59576912f * (x + 0.044715f * (x * x * x)); }

// Returns log(1 + e^x) to 4 units in the last place; NaN of NaN.
inline float Softplus(float x) {
  float size = x < 0.0f ? -x : x, t = size > 87.0f ? 0.0f : ExpWithin(-size);
  // log(1 + t) = 2 artanh(s) of s = t / (2 + t), which is at most 1/3: its series without terms that are less than 2^-29 of it.
  float s = t / (2.0f + t), q = s * s, y = 1.0f / 15.0f;
  y = y * q + 1.0f / 13.0f, y = y * q + 1.0f / 11.0f, y = y * q + 1.0f / 9.0f;
  y = y * q + 1.0f / 7.0f, y = y * q + 1.0f / 5.0f, y = y * q + 1.0f / 3.0f;
  return (x < 0.0f ? 0.0f : x) + 2.0f * (s + s * (q * y));
}

template <Function function>
inline float Of(float x) {
  if constexpr (function == Function::kExp) return Exp(x);
  if constexpr (function == Function::kSigmoid) return x != x ? x : Sigmoid(x);
  if constexpr (function == Function::kSilu) return x * Sigmoid(x);
  if constexpr (function == Function::kSoftplus) return Softplus(x);
  return x * Sigmoid(GeluArgument(x));
}

template <Function function>
void ApplyTo(const float* __restrict x, float* __restrict y, int64_t count) {
  for (int64_t i = 0; i < count; ++i) y[i] = Of<function>(x[i]);
}

// y of count numbers x, by several threads where there are many.
inline void Apply(ffi::ThreadPool& pool, Function function, const float* x, float* y, int64_t count) {
  constexpr int64_t kAtOnce = 8192;  // numbers that are computed before another thread could begin
  auto apply = function == Function::kExp        ? &ApplyTo<Function::kExp>
               : function == Function::kSigmoid  ? &ApplyTo<Function::kSigmoid>
               : function == Function::kSilu     ? &ApplyTo<Function::kSilu>
               : function == Function::kSoftplus ? &ApplyTo<Function::kSoftplus>
                                                 : &ApplyTo<Function::kGeluTanh>;
  int64_t items = SharesOf(pool, count, kAtOnce);
  auto work = [&](int64_t item) {
    int64_t first = count * item / items, past = count * (item + 1) / items;
    apply(x + first, y + first, past - first);
  };
  if (items <= 1) return work(0);
  ParallelFor(pool, items, work);
}

}  // namespace jpaged
