// The rows of x of a product in the form that tiles take, for weights of which a few rows at a time become bf16.
#pragma once

#include "../kernels.h"

namespace jpaged {

class Operand {
 public:
  Operand(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E);

  // How many rows of a weight are best multiplied at once; memory for so many is read.
  int64_t AtOnce() const;

  // y[t * stride + n] of `count` rows of a bf16 weight. Any thread may call it.
  void Multiply(const bf16* w, int64_t count, float* y, int64_t stride) const;

 private:
  const bf16* x_;  // where it is packed
  int64_t T_, E_;
};

}  // namespace jpaged
