// The call of head_write.h from XLA: tokens are divided between threads.
#include "head_write.h"

#include "read_scale.h"

namespace jpaged {
namespace {

// The pool is changed in place: `written` is its memory.
ffi::Error HeadWrite(ffi::ThreadPool pool, Bf16<4> qkv, Bf16<4> kept, Int32<0> layer, Int32<1> slots, ffi::AnyBuffer q_scale,
                     ffi::AnyBuffer k_scale, Float32<2> cos, Float32<2> sin, ffi::Result<Bf16<3>> q, ffi::Result<Bf16<4>> written,
                     int64_t num_layers, float eps, bool has_offset, bool in_f32) {
  constexpr int64_t kAtOnce = 16384;  // numbers that are prepared before another thread could begin
  auto shape = qkv.dimensions(), of_pool = kept.dimensions();
  HeadProblem p{.qkv = Data(qkv), .q = Data(*q), .pool = Data(*written), .slots = slots.typed_data()};
  if (p.pool != Data(kept)) std::memcpy(p.pool, Data(kept), kept.size_bytes());
  int64_t T = shape[0];
  p.K = shape[1], p.G = shape[2] - 2, p.D = shape[3], p.half = cos.element_count() > 0 ? cos.dimensions()[1] : 0;
  if (p.D % 32 != 0 || of_pool[2] != 2 * p.K || of_pool[3] != p.D || 2 * p.half > p.D) {
    return ffi::Error::InvalidArgument("heads of other widths than the pool's, or no whole 32s");
  }
  p.slots_of_layer = of_pool[0] / num_layers * of_pool[1], p.first_slot = layer.typed_data()[0] * p.slots_of_layer;
  p.cos = cos.typed_data(), p.sin = sin.typed_data(), p.eps = eps, p.in_f32 = in_f32;
  static thread_local Memory memory;
  float* scales = Scratch<float>(memory, 2 * p.D);
  if (q_scale.element_count() > 0) {
    p.q_scale = scales, p.k_scale = scales + p.D;
    ffi::Error error = ReadScale(q_scale, has_offset, in_f32, p.D, scales);
    if (error.success()) error = ReadScale(k_scale, has_offset, in_f32, p.D, scales + p.D);
    if (error.failure()) return error;
  }
  int64_t items = SharesOf(pool, T, std::max<int64_t>(1, kAtOnce / (p.K * shape[2] * p.D)));
  auto work = [&](int64_t item) { WriteHeads(p, T * item / items, T * (item + 1) / items); };
  if (items == 1) return work(0), ffi::Error::Success();
  ParallelFor(pool, items, work);
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_head_write, jpaged::HeadWrite,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<4>>()
                                  .Arg<jpaged::Bf16<4>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Ret<jpaged::Bf16<3>>()
                                  .Ret<jpaged::Bf16<4>>()
                                  .Attr<int64_t>("num_layers")
                                  .Attr<float>("eps")
                                  .Attr<bool>("has_offset")
                                  .Attr<bool>("in_f32"));
