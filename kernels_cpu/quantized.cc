// The call of quantized.h from XLA: the first `count` rows of y are computed, the others (padding) are zeros.
#include "quantized.h"

#include <string>

#include "read_quantized.h"

namespace jpaged {
namespace {

// Writes the number of a name among names, or returns an error that has it.
template <typename Enum, size_t count>
ffi::Error Parse(const char* what, std::string_view name, const std::string_view (&names)[count], Enum* number) {
  for (size_t i = 0; i < count; ++i) {
    if (name == names[i]) return *number = static_cast<Enum>(i), ffi::Error::Success();
  }
  return ffi::Error::InvalidArgument(std::string(what) + " '" + std::string(name) + "' is not known");
}

// Returns an error that says which width is wrong, if one is: kernels take the weight's inputs by 32.
ffi::Error CheckWidths(const Quantized& w, ffi::Span<const int64_t> values, size_t zeros) {
  auto error = [&](const char* problem) {
    return ffi::Error::InvalidArgument("a weight of N=" + std::to_string(w.N) + ", E=" + std::to_string(w.E) +
                                       " with scales of S=" + std::to_string(w.S) + ": " + problem);
  };
  if (w.E <= 0 || w.E % kPacked != 0) return error("E must be a multiple of 32");
  if (w.S <= 0 || w.E % w.S != 0) return error("S must divide E");
  if (w.form == Form::kInt4 && (w.E / w.S) % kPacked != 0) return error("a scale of int4 must be of whole 32s");
  int64_t width = w.form == Form::kInt4 ? w.E / 2 : w.E;
  if (values.size() != 2 || values[0] != w.N || values[1] != width) return error("its values have another shape");
  if (zeros != 0 && zeros != static_cast<size_t>(w.N * w.S)) return error("its zeros have another shape than its scales");
  return ffi::Error::Success();
}

ffi::Error CheckInterleaved(const Quantized& w, Activations activations) {
  if (w.form == Form::kE4m3) return ffi::Error::InvalidArgument("weights of fp8 are not interleaved");
  if (!TakesInterleaved(activations)) return ffi::Error::InvalidArgument("interleaved weights have no product with these activations");
  if (w.N % kInterleaved == 0) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("N=" + std::to_string(w.N) + " of an interleaved weight must be a multiple of 16");
}

ffi::Error Product(ffi::ThreadPool pool, Bf16<2> x, ffi::AnyBuffer values, Float32<2> scales, Float32<2> zeros, Int32<0> count,
                   ffi::Result<ffi::AnyBuffer> y, std::string_view form, std::string_view activations, bool interleaved) {
  Quantized w{};
  Activations chosen{};
  ffi::Error error = Read(values, scales, zeros, x.dimensions()[1], {form, activations, interleaved}, &w, &chosen);
  if (error.failure()) return error;
  int64_t all = x.dimensions()[0], T = std::clamp<int64_t>(count.typed_data()[0], 0, all);
  bool in_f32 = y->element_type() == ffi::F32;
  int64_t row = w.N * (in_f32 ? sizeof(float) : sizeof(bf16));
  std::memset(static_cast<char*>(y->untyped_data()) + T * row, 0, (all - T) * row);
  if (T == 0) return ffi::Error::Success();
  if (in_f32) {
    Multiply(pool, Data(x), w, chosen, y->typed_data<float>(), T);
  } else if (!Multiply(pool, Data(x), w, chosen, static_cast<bf16*>(y->untyped_data()), T)) {
    return ffi::Error::InvalidArgument("a product with these activations is of f32");
  }
  return ffi::Error::Success();
}
}  // namespace

ffi::Error Read(const ffi::AnyBuffer& values, const Float32<2>& scales, const Float32<2>& zeros, int64_t E, const Told& told,
                Quantized* w, Activations* activations) {
  ffi::Error error = Parse("form", told.form, {"int8", "int4", "fp8"}, &w->form);
  if (error.success()) error = Parse("activations", told.activations, {"plain", "int8", "int16"}, activations);
  if (error.failure()) return error;
  w->order = told.interleaved ? Order::kInterleaved : Order::kRows;
  w->values = values.untyped_data(), w->scales = scales.typed_data();
  w->zeros = zeros.element_count() > 0 ? zeros.typed_data() : nullptr;
  w->N = scales.dimensions()[0], w->E = E, w->S = scales.dimensions()[1];
  error = CheckWidths(*w, values.dimensions(), zeros.element_count());
  if (error.success() && w->order == Order::kInterleaved) error = CheckInterleaved(*w, *activations);
  return error;
}
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_quantized, jpaged::Product,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("form")
                                  .Attr<std::string_view>("activations")
                                  .Attr<bool>("interleaved"));
