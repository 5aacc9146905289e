// The call of functions.h from XLA.
#include "functions.h"

#include <string>

#include "calls.h"

namespace jpaged {
namespace {

ffi::Error Parse(std::string_view name, Function* function) {
  if (name == "exp") return *function = Function::kExp, ffi::Error::Success();
  if (name == "sigmoid") return *function = Function::kSigmoid, ffi::Error::Success();
  if (name == "silu") return *function = Function::kSilu, ffi::Error::Success();
  if (name == "softplus") return *function = Function::kSoftplus, ffi::Error::Success();
  if (name == "gelu_tanh") return *function = Function::kGeluTanh, ffi::Error::Success();
  return ffi::Error::InvalidArgument("function '" + std::string(name) + "' is not known");
}

ffi::Error Applied(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, std::string_view name) {
  Function function{};
  ffi::Error error = Parse(name, &function);
  if (error.failure()) return error;
  if (x.element_type() != ffi::F32 || y->element_type() != ffi::F32 || x.element_count() != y->element_count()) {
    return ffi::Error::InvalidArgument("x and y must be as many numbers of f32");
  }
  Apply(pool, function, static_cast<const float*>(x.untyped_data()), static_cast<float*>(y->untyped_data()),
        static_cast<int64_t>(x.element_count()));
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_function, jpaged::Applied,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("name"));
