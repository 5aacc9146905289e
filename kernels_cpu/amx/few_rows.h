// Products of few rows of x with weights in 8 bits, without tiles, of which few rows would leave most empty.
#pragma once

#include "../quantized.h"

namespace jpaged::amx {

// Up to how many rows of x MultiplyFewRows takes with this weight; 0 where it takes none.
int64_t MostFewRows(const Quantized& w);

// y = x . w^T for T rows of x, with the bits that tiles give.
void MultiplyFewRows(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T);
void MultiplyFewRows(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, bf16* y, int64_t T);

}  // namespace jpaged::amx
