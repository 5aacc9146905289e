// Products with weights of int8 and int4, x in integers: with VNNI each 32 inputs of a row are rounded to a 127th of the
// largest of them; with AVX2, which multiplies bytes no faster, each 256 to a 32767th. Weights are what they are.
#pragma once

#include "quantized.h"

namespace jpaged {

// One scale a row, which comes after the sum; or scales of groups, from each of whose integers a zero may be taken.
enum class Scales { kRow, kGroups, kZeros };

template <Form form_, Scales kind_>
struct Integral {
  static constexpr Form form = form_;
  static constexpr Scales kind = kind_;
};

// Calls body with what a weight that is not fp8 is, as a type.
template <typename Body>
void WithKind(const Quantized& w, const Body& body) {
  if (w.form == Form::kInt4 && w.zeros != nullptr) {
    body(Integral<Form::kInt4, Scales::kZeros>());
  } else if (w.form == Form::kInt4) {
    body(Integral<Form::kInt4, Scales::kGroups>());
  } else if (w.S > 1) {
    body(Integral<Form::kInt8, Scales::kGroups>());
  } else {
    body(Integral<Form::kInt8, Scales::kRow>());
  }
}

// As Multiply of quantized.h, of weights that are not fp8. AVX2 and AVX-512 each have theirs.
void MultiplyIntegers(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T);

}  // namespace jpaged
