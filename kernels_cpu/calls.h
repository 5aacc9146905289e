// What the files that XLA calls share: its header, and names of its arrays.
#pragma once

#include "kernels.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged {

template <size_t rank>
using Bf16 = ffi::Buffer<ffi::BF16, rank>;

template <size_t rank>
using Int32 = ffi::Buffer<ffi::S32, rank>;

template <size_t rank>
using Float32 = ffi::Buffer<ffi::F32, rank>;

template <size_t rank>
inline bf16* Data(Bf16<rank> x) {
  return reinterpret_cast<bf16*>(x.untyped_data());
}

}  // namespace jpaged
