// Root mean square norms of rows of bf16. A row's sum of squares runs in one order, and numbers are rounded where it is written
// here, the same on every level, so a row's bits are its own.
#pragma once

#include <cmath>

#include "kernels.h"

namespace jpaged {

constexpr int64_t kParts = 16;  // partial sums of a row's squares

// Norms D numbers of bf16 that are widened, whole 16s, in place. in_f32: the scale is applied before they are rounded.
inline void NormRow(const float* __restrict scale, int64_t D, float eps, bool in_f32, float* __restrict x) {
  float parts[kParts] = {};
  for (int64_t d = 0; d < D; d += kParts) {
    for (int64_t i = 0; i < kParts; ++i) parts[i] += x[d + i] * x[d + i];
  }
  for (int64_t count = kParts / 2; count > 0; count /= 2) {
    for (int64_t i = 0; i < count; ++i) parts[i] += parts[i + count];
  }
  float factor = 1.0f / std::sqrt(parts[0] / D + eps);
  if (in_f32) {
    for (int64_t d = 0; d < D; ++d) x[d] = FromBf16(ToBf16(x[d] * factor * scale[d]));
  } else {
    for (int64_t d = 0; d < D; ++d) x[d] = FromBf16(ToBf16(FromBf16(ToBf16(x[d] * factor)) * scale[d]));
  }
}

}  // namespace jpaged
