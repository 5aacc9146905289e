// y = x . w^T for bf16 x [T, E] and a weight w [N, E] in 8 or 4 bits, in f32. Weights are widened in registers or in the
// cache, so that memory gives the bits as they lie and no more. Each processor has its own Multiply; an element's sum runs
// in one order whatever T and its place are, so a row's bits do not depend on the batch.
#pragma once

#include "kernels.h"

namespace jpaged {

enum class Form : int64_t { kInt8, kInt4, kFp8 };

constexpr int64_t kPacked = 32;  // inputs that lie together in int4

struct Quantized {
  Form form;
  const void* values;
  const float *scales, *zeros;  // [N, S], each of E / S inputs, whole 32s; zeros may be null
  int64_t N, E, S;

  // Whether a row has one scale, which comes after the sum.
  bool IsByRow() const { return form != Form::kInt4 && S == 1; }
};

void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T);

}  // namespace jpaged
