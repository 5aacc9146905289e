// y = x . w^T for bf16 x [T, E] and w [N, E] as they lie in memory, accumulated in f32. An element's sum runs in
// one order whatever T and its place are, so a row's bits do not depend on the batch. Each level of processors defines these in
// its level.cc.
#pragma once

#include "kernels.h"

namespace jpaged {

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E);
void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E);

}  // namespace jpaged
