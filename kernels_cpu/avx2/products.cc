// Products of plain weights with AVX2 and FMA, in f32.
#include "../f32_products.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::avx2 {

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E) {
  MultiplyInF32<Lanes>(pool, x, w, y, T, N, E);
}

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E) {
  MultiplyInF32<Lanes>(pool, x, w, y, T, N, E);
}

bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, float* y, int64_t T, int64_t N,
         int64_t E, int64_t F) {
  return MlpInF32<Lanes>(pool, kind, x, gate_up, down, y, T, N, E, F);
}

bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, bf16* y, int64_t T, int64_t N,
         int64_t E, int64_t F) {
  return MlpInF32<Lanes>(pool, kind, x, gate_up, down, y, T, N, E, F);
}

void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E) {
  MultiplyExpertsInF32<Lanes>(pool, pairs, experts, N, E);
}

}  // namespace jpaged::avx2
