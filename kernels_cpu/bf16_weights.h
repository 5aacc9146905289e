// Products with weights in 8 and 4 bits as bf16 (Activations::kPlain): a few rows of the weight at a time become bf16 in the
// cache and meet all rows of x there. Those with one scale a row do as they are, which bf16 holds, others times their scales,
// rounded.
//
// `Widener` makes bf16 of 32 values: Exact(from, to), Scaled(from, scale, to), and Int4(scale, zero).Put(from, to). `Operand`
// has the rows of x in the form that the level multiplies: kAtOnce rows of a weight, for so many of which memory is read, and
// Multiply(w, count, y, stride) with y[t * stride + n], which any thread may call.
#pragma once

#include "quantized.h"

namespace jpaged {

// On any level whose Lanes hold 8 f32.
template <typename L>
struct EvenOddWidener {
  template <typename Byte>
  static void Exact(const Byte* from, bf16* to) {
    Scaled(from, 1.0f, to);
  }

  static void Scaled(const int8_t* from, float scale, bf16* to) {
    for (int64_t i = 0; i < kPacked; i += 2 * L::kCount) {
      typename L::Floats even, odd, s = L::Set(scale * L::kInt8);
      L::FromInt8(from + i, even, odd);
      L::PutEvenOdd(to + i, L::Mul(even, s), L::Mul(odd, s));
    }
  }

  static void Scaled(const E4m3* from, float scale, bf16* to) {
    for (int64_t i = 0; i < kPacked; i += 2 * L::kCount) {
      typename L::Floats even, odd, s = L::Set(scale * L::kE4m3);
      L::FromE4m3(from + i, even, odd);
      L::PutEvenOdd(to + i, L::Mul(even, s), L::Mul(odd, s));
    }
  }

  // What the 16 values of int4 stand for, (value - zero) * scale: a look-up.
  class Int4 {
   public:
    Int4(float scale, float zero) {
      for (int i = 0; i < 16; ++i) table_[i] = ToBf16((static_cast<float>(i - 8) - zero) * scale);
    }
    void Put(const uint8_t* from, bf16* to) const { L::LookUp(table_, from, to); }

   private:
    bf16 table_[16];
  };
};

// `groups` neighbours of `group` values each, times their scales; scales null is as they are.
template <typename Widener, typename Byte>
void WidenBytes(const Byte* from, const float* scales, int64_t groups, int64_t group, bf16* to) {
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t i = 0; i < group; i += kPacked, from += kPacked, to += kPacked) {
      if (scales == nullptr) {
        Widener::Exact(from, to);
      } else {
        Widener::Scaled(from, scales[g], to);
      }
    }
  }
}

// Rows [first, first + count) of w as bf16.
template <typename Widener>
void WidenRows(const Quantized& w, int64_t first, int64_t count, bf16* to) {
  const uint8_t* from = w.Row(first);
  const float* scales = w.Kind() == Scales::kRow ? nullptr : w.scales + first * w.S;
  if (w.form == Form::kInt8) {
    WidenBytes<Widener>(reinterpret_cast<const int8_t*>(from), scales, count * w.S, w.Group(), to);
  } else if (w.form == Form::kE4m3) {
    WidenBytes<Widener>(reinterpret_cast<const E4m3*>(from), scales, count * w.S, w.Group(), to);
  } else {
    const float* zeros = w.zeros == nullptr ? nullptr : w.zeros + first * w.S;
    for (int64_t g = 0; g < count * w.S; ++g) {
      typename Widener::Int4 table(scales[g], zeros == nullptr ? 0.0f : zeros[g]);
      for (int64_t i = 0; i < w.Group(); i += kPacked, from += kPacked / 2, to += kPacked) table.Put(from, to);
    }
  }
}

template <typename Widener, typename Operand>
void MultiplyWidened(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  constexpr int64_t kAtOnce = Operand::kAtOnce;
  Operand operand(pool, x, T, w.E);
  int64_t blocks = (w.N + kAtOnce - 1) / kAtOnce, items = SharesOf(pool, blocks, 1);
  ParallelFor(pool, items, [&](int64_t item) {
    static thread_local Memory memory;
    bf16* rows = Scratch<bf16>(memory, kAtOnce * w.E);
    for (int64_t block = blocks * item / items; block < blocks * (item + 1) / items; ++block) {
      int64_t n = block * kAtOnce, here = std::min(kAtOnce, w.N - n);
      WidenRows<Widener>(w, n, here, rows);
      int64_t next = std::min(kAtOnce, w.N - n - here) * w.RowBytes();  // comes towards the cache meanwhile
      for (int64_t byte = 0; byte < next; byte += kCacheLine) PrefetchL2(w.Row(n + here) + byte);
      operand.Multiply(rows, here, y + n, w.N);
      if (w.Kind() != Scales::kRow) continue;
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t i = 0; i < here; ++i) y[t * w.N + n + i] *= w.scales[n + i];
      }
    }
  });
}

}  // namespace jpaged
