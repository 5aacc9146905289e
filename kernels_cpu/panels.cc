// The call of panels.h from XLA: the first `count` rows of y are computed, the others (padding) are zeros.
#include "panels.h"

#include <cstring>

#include "calls.h"

namespace jpaged {
namespace {

ffi::Error Panels(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, Int32<0> count, ffi::Result<Float32<2>> y,
                  ffi::Result<Float32<1>> packed) {
  int64_t all = x.dimensions()[0], E = x.dimensions()[1], N = w.dimensions()[0];
  int64_t T = std::clamp<int64_t>(count.typed_data()[0], 0, all);
  std::memset(y->typed_data() + T * N, 0, (all - T) * N * sizeof(float));
  auto multiply = [&](auto* x, auto* w) {
    MultiplyPanels(pool, x, w, packed->typed_data(), y->typed_data(), T, N, E);
  };
  if (x.element_type() == ffi::F32) {
    multiply(static_cast<const float*>(x.untyped_data()), static_cast<const float*>(w.untyped_data()));
  } else {
    multiply(static_cast<const bf16*>(x.untyped_data()), static_cast<const bf16*>(w.untyped_data()));
  }
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_panels, jpaged::Panels,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<jpaged::Float32<2>>()
                                  .Ret<jpaged::Float32<1>>());
