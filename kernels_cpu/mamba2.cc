// The call of mamba2.h from XLA: rows, heads and tiles of their states are divided between threads.
#include "mamba2.h"

#include "calls.h"

namespace jpaged {
namespace {

// The pool is changed in place: `out` is its memory.
ffi::Error Mamba2(ffi::ThreadPool pool, Float32<3> x, Float32<2> decay, Float32<3> b, Float32<3> c, Float32<4> states,
                  Int32<1> starts, Int32<1> read, Int32<1> write, ffi::Result<Float32<3>> y, ffi::Result<Float32<4>> out) {
  if (out->typed_data() != states.typed_data()) {
    std::memcpy(out->typed_data(), states.typed_data(), states.size_bytes());
  }
  ScanProblem p{.x = x.typed_data(), .decay = decay.typed_data(), .b = b.typed_data(), .c = c.typed_data()};
  p.pool = out->typed_data(), p.y = y->typed_data();
  p.starts = starts.typed_data(), p.read = read.typed_data(), p.write = write.typed_data();
  p.slots = states.dimensions()[0], p.H = x.dimensions()[1], p.G = b.dimensions()[1];
  p.P = x.dimensions()[2], p.N = b.dimensions()[2];
  int64_t S = read.dimensions()[0], T = x.dimensions()[0], width = p.H * p.P;
  std::memset(p.y + p.starts[S] * width, 0, (T - p.starts[S]) * width * sizeof(float));  // padding
  int64_t tiles = (p.P + kStateRows - 1) / kStateRows, heads = S * p.H;
  // A thread takes all tiles of a head, which lie together, as long as each has several heads.
  int64_t at_once = heads < 4 * NumThreads(pool) ? 1 : tiles;
  ParallelFor(pool, heads * (tiles / at_once), [&](int64_t i) {
    int64_t head = i * at_once / tiles, first = i * at_once % tiles;
    for (int64_t tile = first; tile < first + at_once; ++tile) StepRows(p, head / p.H, head % p.H, tile * kStateRows);
  });
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_mamba2, jpaged::Mamba2,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Float32<3>>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Float32<3>>()
                                  .Arg<jpaged::Float32<3>>()
                                  .Arg<jpaged::Float32<4>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Ret<jpaged::Float32<3>>()
                                  .Ret<jpaged::Float32<4>>());
