// What the level of NEON has; level.cc says what serves.
#pragma once

#include "../experts.h"
#include "../gated_delta.h"
#include "../group_attention.h"
#include "../head_write.h"
#include "../linear.h"
#include "../low_rank.h"
#include "../mamba2.h"
#include "../mlp.h"
#include "../norm.h"
#include "../paged_attention.h"
#include "../panels.h"
#include "../quantized.h"

namespace jpaged::neon {

void Attend(const Problem& p, const Item& item, const Item* after);
void AttendInt8(const Problem& p, const Item& item, const Item* after);
void AttendE4m3(const Problem& p, const Item& item, const Item* after);
void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E);
void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E);
bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, float* y, int64_t T, int64_t N,
         int64_t E, int64_t F);
bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, bf16* y, int64_t T, int64_t N,
         int64_t E, int64_t F);
void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E);
void AddLowRank(const float* const* h, float* const* y, int64_t count, const bf16* b, int64_t rank, int64_t N, int64_t width);
void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Activations activations, float* y, int64_t T);
void MultiplyInt16(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T);
void StepColumns(const DeltaProblem& p, int64_t row, int64_t head, int64_t column);
void StepRows(const ScanProblem& p, int64_t row, int64_t head, int64_t first);
void NormRows(const NormProblem& p, int64_t first, int64_t last);
void WriteHeads(const HeadProblem& p, int64_t first, int64_t last);
void MultiplyPanels(ffi::ThreadPool& pool, const float* x, const float* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E);
void MultiplyPanels(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E);
void AttendGroups(ffi::ThreadPool& pool, const GroupProblem& p);

}  // namespace jpaged::neon
