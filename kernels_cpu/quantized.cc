// The call of quantized.h from XLA: the first `count` rows of y are computed, the others (padding) are zeros.
#include "quantized.h"

#include <cstring>
#include <vector>

namespace jpaged {
namespace {

inline uint32_t Bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// The loops are plain, for the compiler to make vectors of.
void WidenInt8(const int8_t* from, int64_t n, bf16* to) {
  for (int64_t i = 0; i < n; ++i) to[i] = Bits(static_cast<float>(from[i])) >> 16;  // whole numbers up to 127 have no bits below
}

void WidenFp8(const uint8_t* from, int64_t n, bf16* to) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t v = from[i], sign = (v & 0x80) << 24;
    uint32_t normal = ((v & 0x7f) << 20) + (120u << 23), subnormal = Bits(static_cast<float>(v & 7) * 0x1p-9f);
    to[i] = (sign | ((v & 0x78) != 0 ? normal : subnormal)) >> 16;
  }
}

// A byte holds the values i and i + 16 of its group, each 8 more than it is.
void WidenInt4(const uint8_t* from, const float* scales, int64_t n, bf16* to) {
  auto rounded = [](float x) { return (Bits(x) + 0x7fff + (Bits(x) >> 16 & 1)) >> 16; };
  for (int64_t group = 0; group < n / kGroup; ++group, from += kGroup / 2, to += kGroup) {
    float scale = scales[group];
    for (int64_t i = 0; i < kGroup / 2; ++i) {
      to[i] = rounded(static_cast<float>((from[i] & 15) - 8) * scale);
      to[i + kGroup / 2] = rounded(static_cast<float>((from[i] >> 4) - 8) * scale);
    }
  }
}

ffi::Error Multiply(ffi::ThreadPool pool, Bf16<2> x, ffi::AnyBuffer values, Float32<2> scales,
                    Int32<0> count, ffi::Result<Float32<2>> y, int64_t form) {
  int64_t all = x.dimensions()[0], E = x.dimensions()[1], N = scales.dimensions()[0];
  int64_t T = std::clamp<int64_t>(count.typed_data()[0], 0, all);
  std::memset(y->typed_data() + T * N, 0, (all - T) * N * sizeof(float));
  if (T == 0) return ffi::Error::Success();
  Quantized w{static_cast<Form>(form), values.untyped_data(), scales.typed_data(), E};
  Operand operand(pool, Data(x), T, E);
  int64_t at_once = operand.AtOnce(), blocks = (N + at_once - 1) / at_once;
  // Several items a thread: one that begins late is not waited for long.
  int64_t items = std::min(blocks, 8 * pool.num_threads());
  ParallelFor(pool, items, [&](int64_t item) {
    static thread_local std::vector<bf16> rows;
    rows.resize(at_once * E);
    for (int64_t block = blocks * item / items; block < blocks * (item + 1) / items; ++block) {
      int64_t n = block * at_once, here = std::min(at_once, N - n);
      float* to = y->typed_data() + n;
      w.Rows(n, here, rows.data());
      operand.Multiply(rows.data(), here, to, N);
      if (w.form == Form::kInt4) continue;
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t i = 0; i < here; ++i) to[t * N + i] *= w.scales[n + i];
      }
    }
  });
  return ffi::Error::Success();
}
}  // namespace

void Quantized::Rows(int64_t first, int64_t count, bf16* out) const {
  switch (form) {
    case Form::kInt8:
      return WidenInt8(static_cast<const int8_t*>(values) + first * E, count * E, out);
    case Form::kFp8:
      return WidenFp8(static_cast<const uint8_t*>(values) + first * E, count * E, out);
    case Form::kInt4:
      return WidenInt4(static_cast<const uint8_t*>(values) + first * E / 2, scales + first * E / kGroup, count * E, out);
  }
}
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_quantized, jpaged::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<jpaged::Float32<2>>()
                                  .Attr<int64_t>("form"));
