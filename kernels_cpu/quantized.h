// y = x . w^T for bf16 x [T, E] and a weight w [N, E] in 8 or 4 bits, in f32. Weights are widened in registers or in the
// cache, so that memory gives the bits as they lie and no more. An element's sum runs in one order whatever T and its place
// are, so a row's bits do not depend on the batch.
#pragma once

#include "kernels.h"

namespace jpaged {

enum class Form { kInt8, kInt4, kE4m3 };

constexpr int64_t kPacked = 32;  // inputs that lie together in int4: byte i holds those of place i and 16 + i, each plus 8

constexpr int64_t Bytes(Form form, int64_t inputs) { return form == Form::kInt4 ? inputs / 2 : inputs; }

// What x becomes. Each name is one arithmetic, whatever the processor; sums in f32 differ by their order.
//   kPlain: x stays bf16, and so are weights: those with one scale a row as they are (the scale comes after the sum), those
//     with scales of groups rounded to bf16 after they are scaled. XLA multiplies so too.
//   kInt8, kInt16: weights of int8 and int4 meet x in integers: each 32 inputs of a row in steps of a 127th of the largest of
//     them, or each 256 in steps of a 32767th. Sums of integers are exact; scales come after them, in f32. Of e4m3, x stays
//     bf16, and scales are applied in f32. kInt8 has equal bits on every processor.
enum class Activations { kPlain, kInt8, kInt16 };

// How values and scales lie. kRows: an output after another. kInterleaved: 16 outputs together, so that a register holds the
// same inputs of each. Values are bytes of numbers plus what makes them so (128 of int8, 8 of int4): int8 [N / 16][E / 4][16][4
// inputs], int4 [N / 16][E / 8][16][4], of whose bytes the lower four bits are the inputs 0 to 3 of 8 and the upper ones 4 to 7.
// Scales and zeros are [N / 16][S][16]. Both have one arithmetic.
enum class Order { kRows, kInterleaved };

constexpr int64_t kInterleaved = 16;  // outputs

constexpr float kNothing = 1e-30f;  // an x of integers is zero below: its scale would have no inverse

// Returns the largest absolute value of `count` numbers, whole 16s, where 16 words fill a register of L; NaN if there is one.
template <typename L>
float LargestOf(const bf16* x, int64_t count) {
  constexpr int64_t kWords = 2 * L::kCount;
  typename L::Words most = L::ZeroWords();
  for (int64_t i = 0; i < count; i += kWords) {  // bits without a sign are in the order of numbers, NaN the largest
    most = L::MaxUnsigned(most, L::And(L::LoadWords(x + i), L::SetWords(0x7fff)));
  }
  alignas(kCacheLine) bf16 sizes[kWords];
  L::StoreWords(sizes, most);
  return FromBf16(*std::max_element(sizes, sizes + kWords));
}

// One scale a row, which comes after the sum; or scales of groups, from each of whose values a zero may be taken.
enum class Scales { kRow, kGroups, kZeros };

struct Quantized {
  Form form;
  const void* values;
  const float *scales, *zeros;  // [N, S], each of E / S inputs, whole 32s; zeros may be null, and are only of int4
  int64_t N, E, S;
  Order order = Order::kRows;

  Scales Kind() const {
    return zeros != nullptr ? Scales::kZeros : form != Form::kInt4 && S == 1 ? Scales::kRow : Scales::kGroups;
  }
  int64_t Group() const { return E / S; }  // inputs of a scale
  int64_t RowBytes() const { return Bytes(form, E); }
  // Where output n begins, and of interleaved ones the 16 from n on.
  const uint8_t* Row(int64_t n) const { return static_cast<const uint8_t*>(values) + n * RowBytes(); }
};

template <Form form_, Scales kind_>
struct Integral {
  static constexpr Form form = form_;
  static constexpr Scales kind = kind_;
};

// Calls body with what a weight of int8 or int4 is, as a type.
template <typename Body>
void WithIntegral(const Quantized& w, const Body& body) {
  if (w.form == Form::kInt4) {
    if (w.Kind() == Scales::kZeros) return body(Integral<Form::kInt4, Scales::kZeros>());
    return body(Integral<Form::kInt4, Scales::kGroups>());
  }
  if (w.Kind() == Scales::kRow) return body(Integral<Form::kInt8, Scales::kRow>());
  body(Integral<Form::kInt8, Scales::kGroups>());
}

// Each level of processors defines these in its level.cc. Interleaved weights are multiplied with activations that it takes them
// with.
bool TakesInterleaved(Activations activations);
void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Activations activations, float* y, int64_t T);
// The same, rounded to bf16 as it is written; returns false where the level has no such product with these activations.
bool Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Activations activations, bf16* y, int64_t T);

}  // namespace jpaged
