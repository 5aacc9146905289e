// The call of quantize.h from XLA.
#include "quantize.h"

#include <string>

#include "calls.h"

namespace jpaged {
namespace {

ffi::Error Quantize(ffi::ThreadPool pool, ffi::AnyBuffer weight, ffi::Result<ffi::AnyBuffer> values,
                    ffi::Result<Float32<2>> scales, std::string_view form, bool interleaved) {
  constexpr int64_t kAtOnce = 65536;  // numbers that are made before another thread could begin
  bool is_f32 = weight.element_type() == ffi::F32, is_int4 = form == "int4";
  if (!is_f32 && weight.element_type() != ffi::BF16) return ffi::Error::InvalidArgument("the weight must be bf16 or f32");
  if (!is_int4 && form != "int8") return ffi::Error::InvalidArgument("form '" + std::string(form) + "' is not made here");
  if (weight.dimensions().size() != 2) return ffi::Error::InvalidArgument("the weight must be a matrix");
  Plain w{weight.untyped_data(), is_f32, weight.dimensions()[0], weight.dimensions()[1]};
  Stored y{is_int4 ? Form::kInt4 : Form::kInt8, interleaved ? Order::kInterleaved : Order::kRows,
           static_cast<uint8_t*>(values->untyped_data()), scales->typed_data()};
  int64_t whole = is_int4 ? kPacked : interleaved ? 4 : 1, rows = interleaved ? kInterleaved : 1;
  if (w.E % whole != 0 || w.N % rows != 0) {
    return ffi::Error::InvalidArgument("a weight of N=" + std::to_string(w.N) + ", E=" + std::to_string(w.E) +
                                       " must be of whole " + std::to_string(rows) + " and " + std::to_string(whole));
  }
  int64_t groups = w.N / rows, items = SharesOf(pool, groups, std::max<int64_t>(1, kAtOnce / (rows * w.E)));
  ParallelFor(pool, items, [&](int64_t item) {
    int64_t begin = groups * item / items * rows, end = groups * (item + 1) / items * rows;
    is_f32 ? QuantizeRows<float>(w, y, begin, end) : QuantizeRows<bf16>(w, y, begin, end);
  });
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_quantize, jpaged::Quantize,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<jpaged::Float32<2>>()
                                  .Attr<std::string_view>("form")
                                  .Attr<bool>("interleaved"));
