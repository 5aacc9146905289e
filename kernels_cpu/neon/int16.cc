// Products of int8 and int4 weights with x in integers of 16 bits, with NEON.
#include "../int16_products.h"
#include "../interleaved_products.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::neon {

void MultiplyInt16(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  WithIntegral(w, [&](auto weight) {
    using Weight = decltype(weight);
    if (w.order == Order::kInterleaved) {
      InterleavedProducts<Lanes, Weight::form, Weight::kind>::Multiply(pool, x, w, y, T);
    } else {
      Int16Products<Lanes, Weight::form, Weight::kind>::Multiply(pool, x, w, y, T);
    }
  });
}

}  // namespace jpaged::neon
