// Weights of bf16 or f32 as int8 or int4, with the bits of jpaged/models/quantized.py. A scale takes the largest number of an
// output (int8), or of 32 inputs of it (int4), to the form's largest; numbers are rounded to the nearest, the even one of two.
#pragma once

#include <cfloat>
#include <limits>
#include <type_traits>

#include "quantized.h"

namespace jpaged {

struct Plain {  // a weight [N, E] of bf16 or f32; of int4, E is whole 32s
  const void* values;
  bool is_f32;
  int64_t N, E;

  template <typename X>
  const X* Row(int64_t n) const {
    return static_cast<const X*>(values) + n * E;
  }
};

// Where its numbers and scales go; interleaved ones (see Order) are whole 16 outputs, and whole 4 inputs of int8.
struct Stored {
  Form form;
  Order order;
  uint8_t* values;
  float* scales;
};

inline float Wide(bf16 x) { return FromBf16(x); }
inline float Wide(float x) { return x; }

// Returns the scale of `count` numbers: 1 where all are zero, or so small that the scale is below f32's normal numbers, which
// XLA takes for zero. A number that is not finite makes a scale that is not.
template <typename X>
float ScaleOf(const X* x, int64_t count, float largest) {
  using Bits = std::conditional_t<sizeof(X) == 2, uint16_t, uint32_t>;
  Bits most = 0;
  for (int64_t i = 0; i < count; ++i) {  // bits without a sign are in the order of numbers, NaN the largest
    Bits bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    most = std::max<Bits>(most, bits & std::numeric_limits<Bits>::max() / 2);
  }
  X top;
  std::memcpy(&top, &most, sizeof(top));
  float scale = Wide(top) * (1.0f / largest);
  return scale < FLT_MIN ? 1.0f : scale;
}

// Writes the whole numbers nearest to x times the scale's inverse, each in a byte, plus `excess`.
template <typename X>
void PutNumbers(const X* __restrict x, int64_t count, float scale, uint32_t excess, uint8_t* __restrict to) {
  constexpr float kUnits = 12582912.0f;  // 1.5 * 2^23: the f32 beside it are whole numbers, which end in their bits
  float inverse = 1.0f / scale;
  for (int64_t i = 0; i < count; ++i) {
    float sum = Wide(x[i]) * inverse + kUnits;
    uint32_t bits;
    std::memcpy(&bits, &sum, sizeof(bits));
    to[i] = static_cast<uint8_t>(bits + excess);
  }
}

// Writes the values of one output, and its scales with `stride` between them. numbers: E bytes for int4.
template <typename X>
void QuantizeRow(const X* x, int64_t E, const Stored& y, float* scales, int64_t stride, uint8_t* numbers, uint8_t* values) {
  bool is_interleaved = y.order == Order::kInterleaved;
  if (y.form == Form::kInt8) {
    *scales = ScaleOf(x, E, 127.0f);
    return PutNumbers(x, E, *scales, is_interleaved ? 128 : 0, values);
  }
  for (int64_t e = 0; e < E; e += kPacked, scales += stride) {
    *scales = ScaleOf(x + e, kPacked, 7.0f);
    PutNumbers(x + e, kPacked, *scales, 8, numbers + e);
  }
  int64_t half = is_interleaved ? 4 : kPacked / 2;  // that many inputs in the lower bits, and the next in the upper ones
  for (int64_t e = 0; e < E; e += 2 * half, values += half) {
    for (int64_t i = 0; i < half; ++i) values[i] = numbers[e + i] | numbers[e + half + i] << 4;
  }
}

// Quantises the outputs [begin, end): whole 16s where they are interleaved.
template <typename X>
void QuantizeRows(const Plain& w, const Stored& y, int64_t begin, int64_t end) {
  static thread_local Memory of_numbers, of_words;
  int64_t row = Bytes(y.form, w.E), S = y.form == Form::kInt4 ? w.E / kPacked : 1;
  uint8_t* numbers = Scratch<uint8_t>(of_numbers, w.E);
  if (y.order == Order::kRows) {
    for (int64_t n = begin; n < end; ++n) QuantizeRow(w.Row<X>(n), w.E, y, y.scales + n * S, 1, numbers, y.values + n * row);
    return;
  }
  int64_t words = row / sizeof(uint32_t), apart = words + kCacheLine / sizeof(uint32_t);  // not all into one set of the cache
  uint32_t* from = Scratch<uint32_t>(of_words, kInterleaved * apart);
  for (int64_t n = begin; n < end; n += kInterleaved) {
    for (int64_t i = 0; i < kInterleaved; ++i) {
      auto* values = reinterpret_cast<uint8_t*>(from + i * apart);
      QuantizeRow(w.Row<X>(n + i), w.E, y, y.scales + n * S + i, kInterleaved, numbers, values);
    }
    auto* to = reinterpret_cast<uint32_t*>(y.values + n * row);
    for (int64_t word = 0; word < words; ++word, to += kInterleaved) {
      for (int64_t i = 0; i < kInterleaved; ++i) to[i] = from[i * apart + word];
    }
  }
}

}  // namespace jpaged
