// Paged attention of packed queries over a pool in bf16, or in 8 bits with scales: flash attention (arXiv:2205.14135) by KV tiles of 64 slots, read
// straight from the pool. Each processor has its own Attend; pools in 8 bits have one in AVX2, which all have.
//
// A query's result does not depend on its batch or chunk: its KV tiles begin at multiples of 64, every sum along them runs
// in one order, and a tile that it does not see leaves its state as it is.
//
// Shapes: q and o [T, H, D], pool [L*N, P, 2K, D] (K0, V0, K1, V1, ...), its scales [L*N, P, 2K], block table [S, M], G = H / K.
#pragma once

#include "kernels.h"

namespace jpaged {

constexpr int64_t kTile = 64;      // slots of a KV tile
constexpr int64_t kQueries = 48;   // query rows (tokens times heads of a group) of an item, at most
constexpr float kMasked = -1e30f;  // finite, so that a query that has seen nothing yet has a state without NaN

struct Fp8 {  // e4m3
  uint8_t bits;
};

struct Problem {
  const bf16* q;
  const void* pool;     // of bf16, int8_t or Fp8
  const float* scales;  // of a pool in 8 bits
  bf16* o;
  const int32_t *table, *contexts, *starts;
  const float* sinks;                                   // one more score of each query head, or null
  int64_t T, S, M, H, K, G, D, P, first_block, window;  // window 0: none
  float scale, soft_cap;                                // soft_cap 0: none
  bool decode;                                          // one query a row
};

// Consecutive queries of a row, the slots [begin, end) that any of them sees, and the KV heads that one thread works
// through for them.
struct Item {
  int64_t row, token, count, position, begin, end, head, heads;
};

// The running maximum and sum of a query head's softmax, before any score but its sink.
inline void Start(const Problem& p, int64_t query_head, float* top, float* total) {
  if (p.sinks != nullptr) *top = p.sinks[query_head], *total = 1.0f;
}

// Works through one item. `after`: what this thread probably does next, or null.
void Attend(const Problem& p, const Item& item, const Item* after);
void AttendInt8(const Problem& p, const Item& item, const Item* after);
void AttendFp8(const Problem& p, const Item& item, const Item* after);

// Where the keys of the slots [first, first + 64) of a row and head begin (their values follow them, D later); at zeros
// for slots outside [begin, end), whose memory may hold anything.
template <typename T>
inline void Locate(const Problem& p, const Item& item, int64_t head, int64_t first, const T* zeros, const T* (&at)[kTile]) {
  int64_t begin = std::max(first, item.begin) - first, end = std::min(first + kTile, item.end) - first;
  std::fill(at, at + begin, zeros);
  std::fill(at + end, at + kTile, zeros);
  int64_t stride = 2 * p.K * p.D, block = (first + begin) / p.P, inside = (first + begin) % p.P;
  for (int64_t i = begin; i < end; ++block, inside = 0) {
    int64_t index = p.first_block + p.table[item.row * p.M + block];
    const T* slot = static_cast<const T*>(p.pool) + (index * p.P + inside) * stride + 2 * head * p.D;
    for (int64_t n = std::min(end, i + p.P - inside); i < n; ++i, slot += stride) at[i] = slot;
  }
}

}  // namespace jpaged
