// The call of group_attention.h from XLA.
#include "group_attention.h"

#include "calls.h"

namespace jpaged {
namespace {

ffi::Error GroupAttention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, Int32<2> groups,
                          ffi::Result<ffi::AnyBuffer> o, ffi::Result<Float32<1>> packed, float scale) {
  GroupProblem p{.q = q.untyped_data(), .k = k.untyped_data(), .v = v.untyped_data(), .o = o->untyped_data()};
  p.in_bf16 = q.element_type() == ffi::BF16, p.groups = groups.typed_data(), p.packed = packed->typed_data();
  p.N = q.dimensions()[0], p.H = q.dimensions()[1], p.D = q.dimensions()[2], p.K = k.dimensions()[1];
  p.V = v.dimensions()[2], p.G = groups.dimensions()[0], p.scale = scale;
  AttendGroups(pool, p);
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_group_attention, jpaged::GroupAttention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Int32<2>>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Ret<jpaged::Float32<1>>()
                                  .Attr<float>("scale"));
