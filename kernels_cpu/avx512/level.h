// What the level of AVX-512 bf16 and VNNI has; level.cc says what serves.
#pragma once

#include "../experts.h"
#include "../gated_delta.h"
#include "../group_attention.h"
#include "../head_write.h"
#include "../linear.h"
#include "../mamba2.h"
#include "../norm.h"
#include "../paged_attention.h"
#include "../panels.h"
#include "../quantized.h"

namespace jpaged::avx512 {

void Attend(const Problem& p, const Item& item, const Item* after);
void AttendInt8(const Problem& p, const Item& item, const Item* after);  // not of latents
void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E);
void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E);
void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E);

// See Activations: kPlain of any form; kInt8 of int8 and int4; what is not kPlain of e4m3.
void MultiplyPlain(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T);
void MultiplyInt8(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T);
void MultiplyE4m3(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T);
void StepColumns(const DeltaProblem& p, int64_t row, int64_t head, int64_t column);
void StepRows(const ScanProblem& p, int64_t row, int64_t head, int64_t first);
void NormRows(const NormProblem& p, int64_t first, int64_t last);
void WriteHeads(const HeadProblem& p, int64_t first, int64_t last);
void MultiplyPanels(ffi::ThreadPool& pool, const float* x, const float* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E);
void MultiplyPanels(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E);
void AttendGroups(ffi::ThreadPool& pool, const GroupProblem& p);

}  // namespace jpaged::avx512
