// The call of gated_delta.h from XLA: rows, heads and tiles of columns are divided between threads.
#include "gated_delta.h"

#include <cstring>

#include "calls.h"

namespace jpaged {
namespace {

// The pool is changed in place: `out` is its memory.
ffi::Error GatedDelta(ffi::ThreadPool pool, Float32<3> q, Float32<3> k, Float32<3> v, Float32<3> decay,
                      Float32<2> beta, Float32<4> states, Int32<1> starts, Int32<1> read, Int32<1> write, ffi::Result<Float32<3>> o,
                      ffi::Result<Float32<4>> out) {
  if (out->typed_data() != states.typed_data()) {
    std::memcpy(out->typed_data(), states.typed_data(), states.size_bytes());
  }
  DeltaProblem p{.q = q.typed_data(), .k = k.typed_data(), .v = v.typed_data(), .decay = decay.typed_data()};
  p.beta = beta.typed_data(), p.pool = out->typed_data(), p.o = o->typed_data();
  p.starts = starts.typed_data(), p.read = read.typed_data(), p.write = write.typed_data();
  p.slots = states.dimensions()[0], p.Hk = q.dimensions()[1], p.Hv = v.dimensions()[1];
  p.Dk = q.dimensions()[2], p.Dv = v.dimensions()[2], p.Dc = decay.dimensions()[2];
  int64_t S = read.dimensions()[0], T = q.dimensions()[0], width = p.Hv * p.Dv;
  std::memset(p.o + p.starts[S] * width, 0, (T - p.starts[S]) * width * sizeof(float));  // padding
  int64_t tiles = p.Dv / kColumns, heads = S * p.Hv;
  // A thread takes all tiles of a head, which lie together, as long as each has several heads.
  int64_t at_once = heads < 4 * NumThreads(pool) ? 1 : tiles;
  ParallelFor(pool, heads * (tiles / at_once), [&](int64_t i) {
    int64_t head = i * at_once / tiles, first = i * at_once % tiles;
    for (int64_t tile = first; tile < first + at_once; ++tile) {
      StepColumns(p, head / p.Hv, head % p.Hv, tile * kColumns);
    }
  });
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_gated_delta, jpaged::GatedDelta,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Float32<3>>()
                                  .Arg<jpaged::Float32<3>>()
                                  .Arg<jpaged::Float32<3>>()
                                  .Arg<jpaged::Float32<3>>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Float32<4>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Ret<jpaged::Float32<3>>()
                                  .Ret<jpaged::Float32<4>>());
