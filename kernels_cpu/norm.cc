// The call of norm.h from XLA: the first `count` rows of y are computed, the others (padding) are zeros.
#include "norm.h"

#include "read_scale.h"

namespace jpaged {
namespace {

ffi::Error Norm(ffi::ThreadPool pool, Bf16<2> x, ffi::AnyBuffer scale, Int32<0> count, ffi::Result<Bf16<2>> y, float eps,
                bool has_offset, bool in_f32) {
  constexpr int64_t kAtOnce = 16384;  // numbers that are normed before another thread could begin
  int64_t all = x.dimensions()[0], E = x.dimensions()[1], T = std::clamp<int64_t>(count.typed_data()[0], 0, all);
  if (E % kParts != 0) return ffi::Error::InvalidArgument("a norm must be of whole 16s");
  std::memset(Data(*y) + T * E, 0, (all - T) * E * sizeof(bf16));
  static thread_local Memory of_scale;
  float* scales = Scratch<float>(of_scale, E);
  ffi::Error error = ReadScale(scale, has_offset, in_f32, E, scales);
  if (error.failure()) return error;
  const bf16* from = Data(x);
  bf16* to = Data(*y);
  int64_t items = SharesOf(pool, T, std::max<int64_t>(1, kAtOnce / E));
  auto work = [=](int64_t item) {
    for (int64_t t = T * item / items; t < T * (item + 1) / items; ++t) {
      NormRow(from + t * E, scales, E, eps, in_f32, to + t * E);
    }
  };
  if (items == 1) return work(0), ffi::Error::Success();
  ParallelFor(pool, items, work);
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_norm, jpaged::Norm,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<jpaged::Bf16<2>>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("has_offset")
                                  .Attr<bool>("in_f32"));
