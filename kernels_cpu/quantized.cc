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

inline bf16 Rounded(float x) { return (Bits(x) + 0x7fff + (Bits(x) >> 16 & 1)) >> 16; }

// Each of `groups` neighbours times its scale.
void Scale(const float* scales, int64_t groups, int64_t group, bf16* x) {
  for (; groups > 0; --groups, ++scales, x += group) {
    for (int64_t i = 0; i < group; ++i) x[i] = Rounded(FromBits(static_cast<uint32_t>(x[i]) << 16) * *scales);
  }
}

// A byte holds the values i and i + 16 of its 32, each 8 more than it is. `group`: inputs that share a scale.
void WidenInt4(const uint8_t* from, const float* scales, const float* zeros, int64_t groups, int64_t group, bf16* to) {
  for (int64_t g = 0; g < groups; ++g) {
    float scale = scales[g], zero = 8.0f + (zeros == nullptr ? 0.0f : zeros[g]);
    for (int64_t at = 0; at < group; at += kPacked, from += kPacked / 2, to += kPacked) {
      for (int64_t i = 0; i < kPacked / 2; ++i) {
        to[i] = Rounded((static_cast<float>(from[i] & 15) - zero) * scale);
        to[i + kPacked / 2] = Rounded((static_cast<float>(from[i] >> 4) - zero) * scale);
      }
    }
  }
}

ffi::Error Multiply(ffi::ThreadPool pool, Bf16<2> x, ffi::AnyBuffer values, Float32<2> scales, Float32<2> zeros,
                    Int32<0> count, ffi::Result<Float32<2>> y, int64_t form) {
  int64_t all = x.dimensions()[0], E = x.dimensions()[1], N = scales.dimensions()[0];
  int64_t T = std::clamp<int64_t>(count.typed_data()[0], 0, all);
  std::memset(y->typed_data() + T * N, 0, (all - T) * N * sizeof(float));
  if (T == 0) return ffi::Error::Success();
  const float* off = zeros.element_count() > 0 ? zeros.typed_data() : nullptr;
  Quantized w{static_cast<Form>(form), values.untyped_data(), scales.typed_data(), off, E, scales.dimensions()[1]};
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
      if (!w.IsByRow()) continue;
      for (int64_t t = 0; t < T; ++t) {
        for (int64_t i = 0; i < here; ++i) to[t * N + i] *= w.scales[n + i];
      }
    }
  });
  return ffi::Error::Success();
}
}  // namespace

void Quantized::Rows(int64_t first, int64_t count, bf16* out) const {
  const float *own = scales + first * S, *off = zeros == nullptr ? nullptr : zeros + first * S;
  if (form == Form::kInt4) {
    return WidenInt4(static_cast<const uint8_t*>(values) + first * E / 2, own, off, count * S, E / S, out);
  }
  if (form == Form::kInt8) {
    WidenInt8(static_cast<const int8_t*>(values) + first * E, count * E, out);
  } else {
    WidenFp8(static_cast<const uint8_t*>(values) + first * E, count * E, out);
  }
  if (S > 1) Scale(own, count * S, E / S, out);
}
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_quantized, jpaged::Multiply,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Ret<jpaged::Float32<2>>()
                                  .Attr<int64_t>("form"));
