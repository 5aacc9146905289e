// y = x . w^T for bf16 x [T, E] and a weight w [N, E] in 8 or 4 bits, in f32. A few rows of w at a time become bf16 in the
// cache and meet all rows of x there, so that memory gives the bits as they lie and no more.
#pragma once

#include "kernels.h"

namespace jpaged {

enum class Form : int64_t { kInt8, kInt4, kFp8 };

constexpr int64_t kPacked = 32;  // inputs that lie together in int4

struct Quantized {
  Form form;
  const void* values;
  const float *scales, *zeros;  // [N, S], each of E / S inputs; zeros may be null
  int64_t E, S;

  // Whether a row has one scale, which comes after the sum.
  bool IsByRow() const { return form != Form::kInt4 && S == 1; }

  // Rows [first, first + count) as bf16: the values alone, which it holds exactly, where they are scaled by row; else
  // values times scales.
  void Rows(int64_t first, int64_t count, bf16* out) const;
};

// x as a processor's tiles take it. Each processor has its own; an element's sum runs in one order whatever T is.
class Operand {
 public:
  Operand(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E);

  // How many rows of a weight are best multiplied at once; memory for so many is read.
  int64_t AtOnce() const;

  // y[t * stride + n] of `count` rows of a bf16 weight. Any thread may call it.
  void Multiply(const bf16* w, int64_t count, float* y, int64_t stride) const;

 private:
  const bf16* x_;  // or where it is packed
  int64_t T_, E_;
};

}  // namespace jpaged
