// Weights in 8 and 4 bits, as calls from XLA give them.
#pragma once

#include <string_view>

#include "calls.h"
#include "quantized.h"

namespace jpaged {

// What calls from XLA say of a weight: its arrays, and by name its form, what x becomes and whether it is interleaved.
struct Told {
  std::string_view form, activations;
  bool interleaved;
};

// Writes the weight of E inputs, and what x becomes, or returns an error that says what is wrong with them.
ffi::Error Read(const ffi::AnyBuffer& values, const Float32<2>& scales, const Float32<2>& zeros, int64_t E, const Told& told,
                Quantized* w, Activations* activations);

}  // namespace jpaged
