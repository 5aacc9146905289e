// Paged attention of packed queries over a pool in bf16, or in 8 bits with scales: flash attention (arXiv:2205.14135) by KV
// tiles of 64 slots, read straight from the pool.
//
// A query's result does not depend on its batch or chunk: its KV tiles begin at multiples of 64, every sum along them runs
// in one order, and a tile that it does not see leaves its state as it is.
//
// Shapes: q [T, H, D] and o [T, H, V], pool [L*N, P, K, D + V] (K0, V0, K1, V1, ...), its scales [L*N, P, 2K], block table
// [S, M], G = H / K. D and V are multiples of 32. A pool of latents is [L*N, P, D], of a latent of V numbers, which is the
// value, and a rotated key; its scales are [L*N, P, 2]. K is then a number of parts of the query heads, which all read it.
#pragma once

#include <atomic>

#include "kernels.h"

namespace jpaged {

constexpr int64_t kTile = 64;      // slots of a KV tile
constexpr int64_t kSpan = 256;     // slots after which a query's sums begin anew; whole tiles
constexpr float kMasked = -1e30f;  // finite, so that a query that has seen nothing yet has a state without NaN

struct Problem {
  const bf16* q = nullptr;
  const void* pool = nullptr;     // of bf16, int8_t or E4m3
  const float* scales = nullptr;  // of a pool in 8 bits
  bf16* o = nullptr;
  const int32_t *table = nullptr, *contexts = nullptr, *starts = nullptr;
  const float* sinks = nullptr;    // one more score of each query head, or null
  const int32_t* ends = nullptr;   // of each query a position before which it sees what comes after it, or null
  int64_t T = 0, S = 0, M = 0, H = 0, K = 0, G = 0, D = 0, V = 0, P = 0, first_block = 0;
  int64_t window = 0;             // 0: none
  float scale = 1, soft_cap = 0;  // scale above 0; soft_cap 0: none
  bool decode = false;            // one query a row
  bool latent = false;

  // Of what the pool holds of a slot: numbers of a head, from one head to the next, before a head's value, of all heads.
  int64_t Width() const { return latent ? D : D + V; }
  int64_t Apart() const { return latent ? 0 : D + V; }
  int64_t ValueAt() const { return latent ? 0 : D; }
  int64_t Stride() const { return latent ? D : K * (D + V); }
};

// Returns the position after the last that a query sees: its own is `position`, its place among all `token`.
inline int64_t Past(const Problem& p, int64_t token, int64_t position) {
  return p.ends == nullptr ? position + 1 : std::max<int64_t>(position + 1, p.ends[token]);
}

// What a query row has of some slots: the largest score, the sum of the weights relative to it, and the sum of the values by
// these weights. A total of 0: it has seen nothing. They are numbers in a row: top, total, o.
constexpr int64_t kSumsBefore = 2;  // numbers before o

// The sums of items that are spans of one query, each by another thread perhaps. Who comes last adds them up.
struct Spans {
  float* sums;                // [count][query rows of the item][kSumsBefore + V]
  int64_t count;
  std::atomic<int64_t> left;  // items that are not done yet
};

// Consecutive queries of a row, the slots [begin, end) that any of them sees, and the KV heads that one thread works
// through for them. spans: where the slots are the span number `span` of those that the query sees; null: they are all.
struct Item {
  int64_t row, token, count, position, begin, end, head, heads;
  Spans* spans = nullptr;
  int64_t span = 0;
};

// Returns how many query rows (tokens times heads of a group) an item has at most.
int64_t MostQueries();

// Works through one item. `after`: what this thread probably does next, or null. Each level of processors defines these and
// MostQueries in its level.cc, by attend.h.
void Attend(const Problem& p, const Item& item, const Item* after);
void AttendInt8(const Problem& p, const Item& item, const Item* after);
void AttendE4m3(const Problem& p, const Item& item, const Item* after);

}  // namespace jpaged
