// The call of quantized.h from XLA: the first `count` rows of y are computed, the others (padding) are zeros.
#include "quantized.h"

#include <cstring>

namespace jpaged {
namespace {

ffi::Error Product(ffi::ThreadPool pool, Bf16<2> x, ffi::AnyBuffer values, Float32<2> scales, Float32<2> zeros,
                   Int32<0> count, ffi::Result<Float32<2>> y, int64_t form) {
  int64_t all = x.dimensions()[0], E = x.dimensions()[1], N = scales.dimensions()[0];
  int64_t T = std::clamp<int64_t>(count.typed_data()[0], 0, all);
  std::memset(y->typed_data() + T * N, 0, (all - T) * N * sizeof(float));
  if (T == 0) return ffi::Error::Success();
  const float* off = zeros.element_count() > 0 ? zeros.typed_data() : nullptr;
  Quantized w{static_cast<Form>(form), values.untyped_data(), scales.typed_data(), off, N, E, scales.dimensions()[1]};
  Multiply(pool, Data(x), w, y->typed_data(), T);
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_quantized, jpaged::Product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<jpaged::Float32<2>>()
                                  .Attr<int64_t>("form"));
