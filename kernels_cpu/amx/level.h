// What the level of AMX has beside that of AVX-512; level.cc says what serves.
#pragma once

#include "../experts.h"
#include "../linear.h"
#include "../mlp.h"
#include "../paged_attention.h"
#include "../quantized.h"

namespace jpaged::amx {

void Attend(const Problem& p, const Item& item, const Item* after);
void AttendInt8(const Problem& p, const Item& item, const Item* after);  // not of latents
void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E);
void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E);
void Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, float* y, int64_t T, int64_t N,
         int64_t E, int64_t F);
void Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, bf16* y, int64_t T, int64_t N,
         int64_t E, int64_t F);
void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E);
void MultiplyPlain(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T);
void MultiplyPlain(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, bf16* y, int64_t T);
bool MlpPlain(ffi::ThreadPool& pool, Activation kind, const bf16* x, const Quantized& gate_up, const Quantized& down, float* y, int64_t T);
bool MlpPlain(ffi::ThreadPool& pool, Activation kind, const bf16* x, const Quantized& gate_up, const Quantized& down, bf16* y, int64_t T);

}  // namespace jpaged::amx
