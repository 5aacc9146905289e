// The call of linear.h from XLA: the first `count` rows of y are computed, the others (padding) are zeros.
#include "linear.h"

#include <cstring>

#include "calls.h"

namespace jpaged {
namespace {

ffi::Error Linear(ffi::ThreadPool pool, Bf16<2> x, Bf16<2> w, Int32<0> count, ffi::Result<ffi::AnyBuffer> y) {
  int64_t all = x.dimensions()[0], E = x.dimensions()[1], N = w.dimensions()[0];
  int64_t T = std::clamp<int64_t>(count.typed_data()[0], 0, all), row = N * (y->element_type() == ffi::F32 ? 4 : 2);
  std::memset(static_cast<char*>(y->untyped_data()) + T * row, 0, (all - T) * row);
  if (y->element_type() == ffi::F32) {
    Multiply(pool, Data(x), Data(w), y->typed_data<float>(), T, N, E);
  } else {
    Multiply(pool, Data(x), Data(w), static_cast<bf16*>(y->untyped_data()), T, N, E);
  }
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_linear, jpaged::Linear,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<xla::ffi::AnyBuffer>());
