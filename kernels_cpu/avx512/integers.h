// Products with weights of int8 and int4, x in integers of 16 bits: each 256 inputs of a row are rounded to a 32639th of the
// largest of them, which is 2^7 times finer than bf16 is at that one. Weights are what they are.
#pragma once

#include "../quantized.h"

namespace jpaged {

// As Multiply of quantized.h, of weights that are not fp8.
void MultiplyIntegers(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T);

}  // namespace jpaged
