// The calls of mlp.h from XLA: the first `count` rows of a result are computed, the others (padding) are zeros.
#include "mlp.h"

#include <string>

#include "linear.h"
#include "read_quantized.h"

namespace jpaged {
namespace {

ffi::Error Parse(std::string_view name, Activation* kind) {
  if (name == "silu") return *kind = Activation::kSilu, ffi::Error::Success();
  if (name == "gelu_tanh") return *kind = Activation::kGeluTanh, ffi::Error::Success();
  return ffi::Error::InvalidArgument("activation '" + std::string(name) + "' is not known");
}

// A weight of bf16, or in 8 or 4 bits.
struct Weight {
  const bf16* plain = nullptr;
  Quantized w{};
  Activations activations{};

  ffi::Error Read(const ffi::AnyBuffer& values, const Float32<2>& scales, const Float32<2>& zeros, int64_t E, const Told& told) {
    if (told.form != "bf16") return jpaged::Read(values, scales, zeros, E, told, &w, &activations);
    auto shape = values.dimensions();
    if (values.element_type() != ffi::BF16 || shape.size() != 2 || shape[1] != E) {
      return ffi::Error::InvalidArgument("a plain weight must be bf16 of as many inputs as there are");
    }
    plain = static_cast<const bf16*>(values.untyped_data()), w.N = shape[0], w.E = E;
    return ffi::Error::Success();
  }

  void Multiply(ffi::ThreadPool& pool, const bf16* x, float* y, int64_t T) const {
    if (plain != nullptr) return jpaged::Multiply(pool, x, plain, y, T, w.N, w.E);
    jpaged::Multiply(pool, x, w, activations, y, T);
  }
};

ffi::Error Activated(ffi::ThreadPool pool, Float32<3> gate_up, Int32<0> count, ffi::Result<Bf16<2>> h, std::string_view activation) {
  Activation kind{};
  ffi::Error error = Parse(activation, &kind);
  if (error.failure()) return error;
  int64_t all = gate_up.dimensions()[0], F = gate_up.dimensions()[2], T = std::clamp<int64_t>(count.typed_data()[0], 0, all);
  std::memset(Data(*h) + T * F, 0, (all - T) * F * sizeof(bf16));
  Activate(pool, kind, gate_up.typed_data(), Data(*h), T, F);
  return ffi::Error::Success();
}

// between and h are memory for what is between the products, where it does not stay packed in caches.
ffi::Error MlpOf(ffi::ThreadPool pool, Bf16<2> x, ffi::AnyBuffer gate_up, Float32<2> gate_up_scales, Float32<2> gate_up_zeros,
                 ffi::AnyBuffer down, Float32<2> down_scales, Float32<2> down_zeros, Int32<0> count, ffi::Result<ffi::AnyBuffer> y,
                 ffi::Result<Float32<2>> between, ffi::Result<Bf16<2>> h, std::string_view gate_up_form,
                 bool gate_up_interleaved, std::string_view down_form, bool down_interleaved, std::string_view activations,
                 std::string_view activation) {
  int64_t all = x.dimensions()[0], F = h->dimensions()[1], T = std::clamp<int64_t>(count.typed_data()[0], 0, all);
  Activation kind{};
  Weight first, second;
  ffi::Error error = Parse(activation, &kind);
  if (error.success()) {
    error = first.Read(gate_up, gate_up_scales, gate_up_zeros, x.dimensions()[1], {gate_up_form, activations, gate_up_interleaved});
  }
  if (error.success()) error = second.Read(down, down_scales, down_zeros, F, {down_form, activations, down_interleaved});
  if (error.failure()) return error;
  if (first.w.N != 2 * F || second.w.N != y->dimensions()[1]) return ffi::Error::InvalidArgument("gate, up and down do not fit");
  bool in_f32 = y->element_type() == ffi::F32;
  int64_t row = second.w.N * (in_f32 ? sizeof(float) : sizeof(bf16));
  std::memset(static_cast<char*>(y->untyped_data()) + T * row, 0, (all - T) * row);
  if (T == 0) return ffi::Error::Success();
  auto at_once = [&](auto* to) {
    if (first.plain != nullptr && second.plain != nullptr) {
      return Mlp(pool, kind, Data(x), first.plain, second.plain, to, T, second.w.N, first.w.E, F);
    }
    bool is_quantized = first.plain == nullptr && second.plain == nullptr;
    return is_quantized && Mlp(pool, kind, Data(x), first.w, second.w, first.activations, to, T);
  };
  auto* rounded = static_cast<bf16*>(y->untyped_data());
  if (in_f32 ? at_once(y->typed_data<float>()) : at_once(rounded)) return ffi::Error::Success();
  first.Multiply(pool, Data(x), between->typed_data(), T);
  Activate(pool, kind, between->typed_data(), Data(*h), T, F);
  if (in_f32) {
    second.Multiply(pool, Data(*h), y->typed_data<float>(), T);
  } else if (second.plain != nullptr) {
    Multiply(pool, Data(*h), second.plain, rounded, T, second.w.N, F);
  } else if (!Multiply(pool, Data(*h), second.w, second.activations, rounded, T)) {
    return ffi::Error::InvalidArgument("a product with these activations is of f32");
  }
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_activated, jpaged::Activated,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Float32<3>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<jpaged::Bf16<2>>()
                                  .Attr<std::string_view>("activation"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_mlp, jpaged::MlpOf,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<jpaged::Float32<2>>()
                                  .Ret<jpaged::Bf16<2>>()
                                  .Attr<std::string_view>("gate_up_form")
                                  .Attr<bool>("gate_up_interleaved")
                                  .Attr<std::string_view>("down_form")
                                  .Attr<bool>("down_interleaved")
                                  .Attr<std::string_view>("activations")
                                  .Attr<std::string_view>("activation"));
