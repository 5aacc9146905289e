// What serves on a processor with AVX-512 bf16 and VNNI.
#include "level.h"

#include "../avx2/level.h"

namespace jpaged {

int64_t MostQueries() { return 48; }
void Attend(const Problem& p, const Item& item, const Item* after) { avx512::Attend(p, item, after); }
void AttendInt8(const Problem& p, const Item& item, const Item* after) {
  if (p.latent) {
    avx2::AttendInt8(p, item, after);
  } else {
    avx512::AttendInt8(p, item, after);
  }
}
void AttendE4m3(const Problem& p, const Item& item, const Item* after) { avx2::AttendE4m3(p, item, after); }

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E) {
  avx512::Multiply(pool, x, w, y, T, N, E);
}

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E) {
  avx512::Multiply(pool, x, w, y, T, N, E);
}

// Its products of bf16 need no packed rows.
bool Mlp(ffi::ThreadPool&, Activation, const bf16*, const bf16*, const bf16*, float*, int64_t, int64_t, int64_t, int64_t) {
  return false;
}

bool Mlp(ffi::ThreadPool&, Activation, const bf16*, const bf16*, const bf16*, bf16*, int64_t, int64_t, int64_t, int64_t) {
  return false;
}

bool Mlp(ffi::ThreadPool&, Activation, const bf16*, const Quantized&, const Quantized&, Activations, float*, int64_t) { return false; }
bool Mlp(ffi::ThreadPool&, Activation, const bf16*, const Quantized&, const Quantized&, Activations, bf16*, int64_t) { return false; }
bool Multiply(ffi::ThreadPool&, const bf16*, const Quantized&, Activations, bf16*, int64_t) { return false; }

void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E) {
  avx512::MultiplyExperts(pool, pairs, experts, N, E);
}

void StepColumns(const DeltaProblem& p, int64_t row, int64_t head, int64_t column) {
  avx512::StepColumns(p, row, head, column);
}

void StepRows(const ScanProblem& p, int64_t row, int64_t head, int64_t first) { avx512::StepRows(p, row, head, first); }

void NormRows(const NormProblem& p, int64_t first, int64_t last) { avx512::NormRows(p, first, last); }

void WriteHeads(const HeadProblem& p, int64_t first, int64_t last) { avx512::WriteHeads(p, first, last); }

void AddLowRank(const float* const* h, float* const* y, int64_t count, const bf16* b, int64_t rank, int64_t N, int64_t width) {
  avx2::AddLowRank(h, y, count, b, rank, N, width);
}

bool TakesInterleaved(Activations activations) { return activations != Activations::kPlain; }

void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Activations activations, float* y, int64_t T) {
  if (activations == Activations::kPlain) return avx512::MultiplyPlain(pool, x, w, y, T);
  if (w.form == Form::kE4m3) return avx512::MultiplyE4m3(pool, x, w, y, T);
  if (activations == Activations::kInt8) return avx512::MultiplyInt8(pool, x, w, y, T);
  avx2::MultiplyInt16(pool, x, w, y, T);
}

void MultiplyPanels(ffi::ThreadPool& pool, const float* x, const float* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E) {
  avx512::MultiplyPanels(pool, x, w, packed, y, T, N, E);
}

void MultiplyPanels(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* packed, float* y, int64_t T, int64_t N,
                    int64_t E) {
  avx512::MultiplyPanels(pool, x, w, packed, y, T, N, E);
}

void AttendGroups(ffi::ThreadPool& pool, const GroupProblem& p) { avx512::AttendGroups(pool, p); }

}  // namespace jpaged
