// Scales of norms, as calls from XLA give them.
#pragma once

#include "calls.h"

namespace jpaged {

// Writes a norm's scale of bf16 or f32 as it is multiplied by, or returns an error. has_offset: it is above what is stored by 1.
inline ffi::Error ReadScale(const ffi::AnyBuffer& from, bool has_offset, bool in_f32, int64_t D, float* to) {
  bool is_f32 = from.element_type() == ffi::F32;
  if ((!is_f32 && from.element_type() != ffi::BF16) || static_cast<int64_t>(from.element_count()) != D) {
    return ffi::Error::InvalidArgument("a norm's scale must be bf16 or f32, one number a dimension");
  }
  for (int64_t d = 0; d < D; ++d) {
    to[d] = is_f32 ? from.typed_data<float>()[d] : FromBf16(static_cast<const bf16*>(from.untyped_data())[d]);
    // Also a NaN, whose other bits would be taken for those of a number where a normed number is rounded.
    if (!in_f32 || to[d] != to[d]) to[d] = FromBf16(ToBf16(to[d]));
    if (has_offset) to[d] = in_f32 ? 1.0f + to[d] : FromBf16(ToBf16(1.0f + to[d]));
  }
  return ffi::Error::Success();
}

}  // namespace jpaged
