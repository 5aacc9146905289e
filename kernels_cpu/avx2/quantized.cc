// Products with weights in 8 and 4 bits with AVX2 and FMA.
#include "../bf16_weights.h"
#include "../e4m3_products.h"
#include "../f32_products.h"
#include "../int8_products.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::avx2 {

void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Activations activations, float* y, int64_t T) {
  if (activations == Activations::kPlain) return MultiplyWidened<EvenOddWidener<Lanes>, F32Operand<Lanes>>(pool, x, w, y, T);
  if (w.form == Form::kE4m3) return E4m3Products<Lanes>::Multiply(pool, x, w, y, T);
  if (activations == Activations::kInt16) return MultiplyInt16(pool, x, w, y, T);
  WithIntegral(w, [&](auto weight) {
    using Weight = decltype(weight);
    Int8Products<Lanes, Weight::form, Weight::kind>::Multiply(pool, x, w, y, T);
  });
}

}  // namespace jpaged::avx2
