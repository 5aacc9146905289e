// The call of norm.h from XLA: the first `count` rows of results are computed, the others (padding) are zeros.
#include "norm.h"

#include "read_scale.h"

namespace jpaged {
namespace {

// added and sum have no elements where nothing is added to x.
ffi::Error Norm(ffi::ThreadPool pool, Bf16<2> x, Bf16<2> added, ffi::AnyBuffer scale, Int32<0> count, ffi::Result<Bf16<2>> y,
                ffi::Result<Bf16<2>> sum, float eps, bool has_offset, bool in_f32) {
  constexpr int64_t kAtOnce = 16384;  // numbers that are normed before another thread could begin
  int64_t all = x.dimensions()[0], E = x.dimensions()[1], T = std::clamp<int64_t>(count.typed_data()[0], 0, all);
  if (E % kParts != 0) return ffi::Error::InvalidArgument("a norm must be of whole 16s");
  bool is_sum = added.element_count() > 0;
  if (is_sum && (added.element_count() != x.element_count() || sum->element_count() != x.element_count())) {
    return ffi::Error::InvalidArgument("what is added to x, and the sum, must have its shape");
  }
  std::memset(Data(*y) + T * E, 0, (all - T) * E * sizeof(bf16));
  if (is_sum) std::memset(Data(*sum) + T * E, 0, (all - T) * E * sizeof(bf16));
  static thread_local Memory of_scale;
  float* scales = Scratch<float>(of_scale, E);
  ffi::Error error = ReadScale(scale, has_offset, in_f32, E, scales);
  if (error.failure()) return error;
  NormProblem p{.x = Data(x), .scale = scales, .y = Data(*y), .E = E, .eps = eps, .in_f32 = in_f32};
  if (is_sum) p.added = Data(added), p.sum = Data(*sum);
  int64_t items = SharesOf(pool, T, std::max<int64_t>(1, kAtOnce / E));
  auto work = [=](int64_t item) { NormRows(p, T * item / items, T * (item + 1) / items); };
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
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<jpaged::Bf16<2>>()
                                  .Ret<jpaged::Bf16<2>>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("has_offset")
                                  .Attr<bool>("in_f32"));
