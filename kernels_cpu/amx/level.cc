// What serves on a processor with AMX, beside all that AVX-512 has.
#include "level.h"

#include "../avx2/level.h"
#include "../avx512/level.h"

namespace jpaged {
namespace {

// Of e4m3 with a scale a row every name is one arithmetic.
bool IsPlain(const Quantized& w, Activations activations) {
  return activations == Activations::kPlain || (w.form == Form::kE4m3 && w.Kind() == Scales::kRow);
}
}  // namespace

int64_t MostQueries() { return 512; }  // what is kept of so many stays in an L2 cache of 2 MiB, beside a span
void Attend(const Problem& p, const Item& item, const Item* after) { amx::Attend(p, item, after); }
void AttendInt8(const Problem& p, const Item& item, const Item* after) {
  if (p.latent) {
    avx2::AttendInt8(p, item, after);
  } else {
    amx::AttendInt8(p, item, after);
  }
}
void AttendE4m3(const Problem& p, const Item& item, const Item* after) { avx2::AttendE4m3(p, item, after); }

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E) {
  amx::Multiply(pool, x, w, y, T, N, E);
}

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E) {
  amx::Multiply(pool, x, w, y, T, N, E);
}

bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, float* y, int64_t T, int64_t N,
         int64_t E, int64_t F) {
  amx::Mlp(pool, kind, x, gate_up, down, y, T, N, E, F);
  return true;
}

bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, bf16* y, int64_t T, int64_t N,
         int64_t E, int64_t F) {
  amx::Mlp(pool, kind, x, gate_up, down, y, T, N, E, F);
  return true;
}

bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const Quantized& gate_up, const Quantized& down, Activations activations,
         float* y, int64_t T) {
  return IsPlain(gate_up, activations) && IsPlain(down, activations) && amx::MlpPlain(pool, kind, x, gate_up, down, y, T);
}

bool Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const Quantized& gate_up, const Quantized& down, Activations activations,
         bf16* y, int64_t T) {
  return IsPlain(gate_up, activations) && IsPlain(down, activations) && amx::MlpPlain(pool, kind, x, gate_up, down, y, T);
}

void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E) {
  amx::MultiplyExperts(pool, pairs, experts, N, E);
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
  if (IsPlain(w, activations)) return amx::MultiplyPlain(pool, x, w, y, T);
  if (w.form == Form::kE4m3) return avx512::MultiplyE4m3(pool, x, w, y, T);
  if (activations == Activations::kInt8) return avx512::MultiplyInt8(pool, x, w, y, T);
  avx2::MultiplyInt16(pool, x, w, y, T);
}

bool Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Activations activations, bf16* y, int64_t T) {
  if (!IsPlain(w, activations)) return false;
  return amx::MultiplyPlain(pool, x, w, y, T), true;
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
