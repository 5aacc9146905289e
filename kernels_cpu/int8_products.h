// Products with weights of int8 and int4 in integers of 8 bits (Activations::kInt8), on any level whose Lanes hold 8 f32: with
// the bits of avx512/integers.cc, for which this arithmetic is made. 8 outputs are taken at a time, one a lane; the sums of 32
// inputs are exact, and are added up in f32 from one block of 32 to the next.
#pragma once

#include <cmath>

#include "quantized.h"

namespace jpaged {

// A row of x in integers: each 32 inputs in steps of a 127th of the largest of them. NaN or infinity makes a block's scale so.
struct Int8Block {
  int8_t values[kPacked];
  float scale, zero;  // zero: what a zero of 1 takes, minus the scale times the sum of the integers

  explicit Int8Block(const bf16* x) {
    bf16 most = 0;  // bits without a sign are in the order of numbers, NaN the largest
    for (int64_t i = 0; i < kPacked; ++i) most = std::max<bf16>(most, x[i] & 0x7fff);
    float largest = FromBf16(most), inverse = largest < kNothing ? 0.0f : 127.0f / largest;
    scale = largest / 127.0f;
    int32_t sum = 0;
    for (int64_t i = 0; i < kPacked; ++i) {
      float number = FromBf16(x[i]) * inverse;
      values[i] = std::fabs(number) < 127.5f ? static_cast<int8_t>(std::nearbyintf(number)) : 0;
      sum += values[i];
    }
    zero = -scale * static_cast<float>(sum);
  }
};

template <typename L, Form form, Scales kind>
class Int8Products {
 public:
  static void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
    static thread_local Memory memory;
    int64_t blocks = w.E / kPacked;
    Int8Block* rows = Scratch<Int8Block>(memory, T * blocks);
    constexpr int64_t kAtOnce = 16;  // rows of x that are worth a thread
    ParallelFor(pool, (T + kAtOnce - 1) / kAtOnce, [&](int64_t item) {
      for (int64_t i = item * kAtOnce * blocks; i < std::min(T, (item + 1) * kAtOnce) * blocks; ++i) {
        rows[i] = Int8Block(x + i * kPacked);
      }
    });
    int64_t groups = (w.N + kCols - 1) / kCols, items = SharesOf(pool, groups, 4);
    ParallelFor(pool, items, [&](int64_t item) {
      for (int64_t g = groups * item / items; g < groups * (item + 1) / items; ++g) MultiplyGroup(rows, w, g * kCols, y, T);
    });
  }

 private:
  static constexpr int64_t kCols = L::kCount;  // outputs at a time
  static_assert(kCols == 8);

  // 8 outputs from n on for all rows of x.
  static void MultiplyGroup(const Int8Block* x, const Quantized& w, int64_t n, float* y, int64_t T) {
    static thread_local Memory memory;
    float* totals = Scratch<float>(memory, T * kCols);
    std::fill(totals, totals + T * kCols, 0.0f);
    int64_t cols = std::min(kCols, w.N - n), blocks = w.E / kPacked;
    int64_t rows[kCols];  // the last one again where there are no more
    for (int64_t j = 0; j < kCols; ++j) rows[j] = n + std::min(j, cols - 1);
    float of_group[kCols] = {}, zeros[kCols] = {};
    for (int64_t block = 0; block < blocks; ++block) {
      typename L::Bytes weights[kCols];
      int64_t e = block * kPacked;
#pragma GCC unroll 8
      for (int64_t j = 0; j < kCols; ++j) {
        const uint8_t* from = w.Row(rows[j]) + Bytes(form, e);
        PrefetchL2(from + 8 * kCacheLine);
        if constexpr (form == Form::kInt4) {
          weights[j] = L::FromInt4(from);
        } else {
          weights[j] = L::LoadBytes(from);
        }
      }
      if (kind != Scales::kRow && e % w.Group() == 0) {
        for (int64_t j = 0; j < kCols; ++j) {
          of_group[j] = w.scales[rows[j] * w.S + e / w.Group()];
          if (kind == Scales::kZeros) zeros[j] = w.zeros[rows[j] * w.S + e / w.Group()];
        }
      }
      for (int64_t t = 0; t < T; ++t) {
        const Int8Block& of_x = x[t * blocks + block];
        typename L::Bytes values = L::LoadBytes(of_x.values);
        typename L::Integers sums[kCols];
#pragma GCC unroll 8
        for (int64_t j = 0; j < kCols; ++j) sums[j] = L::Products(weights[j], values);
        typename L::Floats number = L::ToFloats(L::SumsOf(sums)), total = L::Load(totals + t * kCols);
        typename L::Floats scale = L::Set(of_x.scale);
        if constexpr (kind == Scales::kRow) {
          total = L::Fma(number, scale, total);
        } else {
          number = L::Mul(number, scale);
          if constexpr (kind == Scales::kZeros) number = L::Fma(L::Load(zeros), L::Set(of_x.zero), number);
          total = L::Fma(number, L::Load(of_group), total);
        }
        L::Store(totals + t * kCols, total);
      }
    }
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t j = 0; j < cols; ++j) {
        y[t * w.N + n + j] = kind == Scales::kRow ? totals[t * kCols + j] * w.scales[n + j] : totals[t * kCols + j];
      }
    }
  }
};

}  // namespace jpaged
