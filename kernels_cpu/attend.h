// Paged attention of one item, for every level of processors and every kind of pool; see paged_attention.h. Prefill and
// decode sum in one order: the same query over the same context has the same bits in both. Within a span of kSpan slots, which
// begins at a multiple of that, a query's sums run on from tile to tile; those of spans are added up one after the other. So
// threads can share the context of one query, and what each of them reads lies together.
//
// `Tiles` multiplies: queries with the keys of a tile, weights with its values. It says in which form they lie, f32_tiles.h
// in f32 on any level, int8_tiles.h in integers, avx512/bf16_tiles.h in bf16. It has
//   Lanes: the level's registers, from its lanes.h
//   Slot: what the pool holds; Weight: what a weight is rounded to, float or bf16
//   kSlots: how many slots are multiplied at a time; kFetches: whether it brings the slots of the next tile into the cache
//   Tiles(p, item): with memory for this item
//   Together(): how many of the item's heads are scored and weighed at a time: one, or all
//   SetQuery(row, q): takes a query row of the item, [heads, count, G]
//   Enter(tile): begins a tile
//   Score(tile, head, scores): scores[row][slot] of rows from `head` on; where a row does not see a slot, anything
//   Weigh(tile, head, weights, alpha, o): o[row] = alpha[row] * o[row] + weights[row] . values, of the same rows, whose weights
//       are 0 where they do not see a slot, and may be changed
//   Write(o, total, to): a row's o / total in bf16, in the dimensions' own order
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "paged_attention.h"

namespace jpaged {

struct SlotRange {
  int64_t low, high;  // slots of a tile: [low, high)
};

// The slots of a tile, and those of the tile that comes next, by where their keys begin; a value is p.ValueAt() later.
template <typename Slot>
struct Tile {
  const Slot *keys[kTile], *next[kTile];
  const Slot* zeros;      // where slots that are not seen point to, whose memory may hold anything
  const SlotRange* seen;  // what each token of the item sees
  int64_t slots;          // that are multiplied, the first ones
};

// Writes where an array has what belongs to the slots [first, first + N) of an item's row; `none` for slots outside [begin, end).
// stride: numbers from one slot of the array to the next.
template <typename T, size_t N>
inline void LocateIn(const T* array, int64_t stride, const Problem& p, const Item& item, int64_t first, const T* none,
                     const T* (&to)[N]) {
  int64_t count = N, begin = std::max(first, item.begin) - first, end = std::min(first + count, item.end) - first;
  std::fill(to, to + begin, none);
  std::fill(to + end, to + count, none);
  int64_t block = (first + begin) / p.P, inside = (first + begin) % p.P;
  for (int64_t i = begin; i < end; ++block, inside = 0) {
    int64_t index = p.first_block + p.table[item.row * p.M + block];
    const T* slot = array + (index * p.P + inside) * stride;
    for (int64_t n = std::min(end, i + p.P - inside); i < n; ++i, slot += stride) to[i] = slot;
  }
}

// Writes where the keys of these slots and of a head begin; zeros for slots outside [begin, end).
template <typename Slot, size_t N>
inline void Locate(const Problem& p, const Item& item, int64_t head, int64_t first, const Slot* zeros, const Slot* (&keys)[N]) {
  LocateIn(static_cast<const Slot*>(p.pool) + head * p.Apart(), p.Stride(), p, item, first, zeros, keys);
}

// Returns e^x to 2 units in the last place; 0 below -87, NaN of NaN.
template <typename L>
inline typename L::Floats Exp(typename L::Floats x) {
  const typename L::Floats magic = L::Set(12582912.0f);  // 1.5 * 2^23: the last bits of what is near it are whole numbers
  typename L::Floats moved = L::Fma(x, L::Set(1.44269504f), magic), n = L::Sub(moved, magic);
  typename L::Floats r = L::Fnma(n, L::Set(0.693359375f), x);
  r = L::Fnma(n, L::Set(-2.12194440e-4f), r);
  typename L::Floats y = L::Set(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    y = L::Fma(y, r, L::Set(c));
  }
  y = L::Fma(y, L::Mul(r, r), L::Add(r, L::Set(1.0f)));
  return L::TimesPower(L::NotBelow(x, L::Set(-87.0f)), y, moved);
}

// Of a query row's scores against a tile applies the soft cap, and returns the largest of those that the row sees, in the slots
// [low, high) of the tile; minus infinity where there are none.
template <typename L>
float LargestScore(const Problem& p, float* scores, int64_t low, int64_t high) {
  if (p.soft_cap > 0) {
    for (int64_t i = 0; i < kTile; ++i) scores[i] = p.soft_cap * std::tanh(scores[i] * p.scale / p.soft_cap) / p.scale;
  }
  const typename L::Floats lowest = L::Set(-std::numeric_limits<float>::infinity());
  typename L::Floats most = lowest;
  if (low == 0 && high == kTile) {
    for (int64_t i = 0; i < kTile; i += L::kCount) most = L::Max(most, L::Load(scores + i));
  } else {
    typename L::Range seen(low, high);
    for (int64_t i = low / L::kCount; i * L::kCount < high; ++i) {
      most = L::Max(most, L::MulOr(lowest, seen.Lanes(i), L::Load(scores + L::kCount * i), L::Set(1.0f)));
    }
  }
  return L::Largest(most);
}

// Turns scores into weights relative to the largest scaled one, 0 where the row does not see the slot, and returns their sum.
template <typename L, typename Weight>
float WeightsOf(const Problem& p, const float* scores, Weight* weights, int64_t low, int64_t high, float top) {
  const typename L::Floats scale = L::Set(p.scale), base = L::Set(top);
  typename L::Floats sum = L::Zero();
  auto weight_of = [&](int64_t i) { return Exp<L>(L::Sub(L::Mul(L::Load(scores + L::kCount * i), scale), base)); };
  constexpr int64_t kParts = kTile / L::kCount;
  if (low == 0 && high == kTile) {
    for (int64_t i = 0; i < kParts; ++i) sum = L::Add(sum, L::Put(weights + L::kCount * i, weight_of(i)));
  } else {
    typename L::Range seen(low, high);
    for (int64_t i = 0; i < kParts; ++i) {
      bool is_seen = L::kCount * i < high && L::kCount * (i + 1) > low;
      typename L::Floats weight = is_seen ? L::OrZero(seen.Lanes(i), weight_of(i)) : L::Zero();
      sum = L::Add(sum, L::Put(weights + L::kCount * i, weight));
    }
  }
  return L::Sum(sum);
}

// Adds the sums of a span to those of the spans before it, each of V numbers.
template <typename L>
void AddSpan(float top, float total, const float* o, int64_t V, float* all_top, float* all_total, float* all_o) {
  if (total == 0.0f) return;
  if (*all_total == 0.0f) {
    *all_top = top, *all_total = total;
    std::memcpy(all_o, o, V * sizeof(float));
    return;
  }
  float most = std::max(*all_top, top);
  float before = *all_top == most ? 1.0f : std::exp(*all_top - most), now = top == most ? 1.0f : std::exp(top - most);
  *all_top = most, *all_total = std::fma(*all_total, before, total * now);
  for (int64_t d = 0; d < V; d += L::kCount) {
    typename L::Floats added = L::Mul(L::Load(o + d), L::Set(now));
    L::Store(all_o + d, L::Fma(L::Load(all_o + d), L::Set(before), added));
  }
}

// One thread's state of an item: per query row the scores and weights of a tile, the factor, and the sums of a span and of all
// spans until now; per token the slots of a tile that it sees; and one slot of zeros of all of the item's heads.
template <typename Tiles>
struct ItemState {
  float *scores, *alpha, *top, *total, *o, *all_top, *all_total, *all_o;
  SlotRange* seen;
  typename Tiles::Weight* weights;
  typename Tiles::Slot* zeros;

  void Reset(int64_t rows, int64_t tokens, int64_t V, int64_t zeros_size) {
    constexpr int64_t kCount = Tiles::Lanes::kCount;  // whole registers of factors are computed
    rows_ = rows, V_ = V;
    int64_t padded = (rows + 3) / 4 * 4;  // whole register tiles of rows may be scored
    scores = Scratch<float>(memory_[0], padded * kTile), alpha = Scratch<float>(memory_[1], rows + kCount);
    top = Scratch<float>(memory_[2], rows + kCount), total = Scratch<float>(memory_[3], rows);
    o = Scratch<float>(memory_[4], rows * V);
    zeros = Scratch<typename Tiles::Slot>(memory_[5], zeros_size);
    all_top = Scratch<float>(memory_[7], rows), all_total = Scratch<float>(memory_[8], rows);
    all_o = Scratch<float>(memory_[9], rows * V), seen = Scratch<SlotRange>(memory_[10], tokens);
    if constexpr (std::is_same_v<typename Tiles::Weight, float>) {
      weights = scores;  // in place
    } else {
      weights = Scratch<typename Tiles::Weight>(memory_[6], rows * kTile);
    }
    std::memset(zeros, 0, zeros_size * sizeof(*zeros));
    std::fill(all_top, all_top + rows, kMasked), std::fill(all_total, all_total + rows, 0.0f);
  }

  void BeginSpan() {
    std::fill(o, o + rows_ * V_, 0.0f);
    std::fill(top, top + rows_, kMasked), std::fill(total, total + rows_, 0.0f);
  }

 private:
  Memory memory_[11];
  int64_t rows_, V_;
};

template <typename Tiles>
void AttendBy(const Problem& p, const Item& item, const Item* after) {
  using L = typename Tiles::Lanes;
  using Slot = typename Tiles::Slot;
  ItemState<Tiles>& state = ThreadLocal<ItemState<Tiles>>();
  int64_t of_head = item.count * p.G, rows = item.heads * of_head, V = p.V;
  state.Reset(rows, item.count, V, item.heads * p.Width());
  Tiles tiles(p, item);
  auto place = [&](int64_t head, int64_t token, int64_t g) {  // among the heads of q and o
    return (item.token + token) * p.H + (item.head + head) * p.G + g;
  };
  for (int64_t head = 0, row = 0; head < item.heads; ++head) {
    for (int64_t token = 0; token < item.count; ++token) {
      for (int64_t g = 0; g < p.G; ++g, ++row) {
        tiles.SetQuery(row, p.q + place(head, token, g) * p.D);
        if (p.sinks != nullptr) {  // a score before any other
          state.all_top[row] = p.sinks[(item.head + head) * p.G + g], state.all_total[row] = 1.0f;
          std::fill(state.all_o + row * V, state.all_o + (row + 1) * V, 0.0f);
        }
      }
    }
  }
  Tile<Slot> tile;
  tile.zeros = state.zeros, tile.seen = state.seen;
  int64_t first = item.begin / kTile * kTile;
  Locate(p, item, item.head, first, tile.zeros, tile.keys);
  state.BeginSpan();
  for (; first < item.end; first += kTile) {
    if (first + kTile < item.end) {
      Locate(p, item, item.head, first + kTile, tile.zeros, tile.next);
    } else if (Tiles::kFetches && after != nullptr) {
      Locate(p, *after, after->head, after->begin / kTile * kTile, tile.zeros, tile.next);
    } else {
      std::fill(tile.next, tile.next + kTile, tile.zeros);
    }
    tile.slots = std::min(kTile, (item.end - first + Tiles::kSlots - 1) / Tiles::kSlots * Tiles::kSlots);
    for (int64_t token = 0; token < item.count; ++token) {
      int64_t position = item.position + token, past = Past(p, item.token + token, position);
      int64_t low = p.window > 0 ? std::clamp<int64_t>(position + 1 - p.window - first, 0, kTile) : 0;
      state.seen[token] = {low, std::max(low, std::min(past - first, kTile))};
    }
    tiles.Enter(tile);
    int64_t together = tiles.Together();
    for (int64_t head = 0; head < item.heads; head += together) {
      int64_t begin = head * of_head, end = begin + together * of_head;
      tiles.Score(tile, head, state.scores + begin * kTile);
      // Maxima first: what follows from a row's would be waited for.
      auto each_row = [&](auto body) {
        for (int64_t row = begin; row < end;) {
          for (int64_t token = 0; token < item.count; ++token) {
            for (int64_t g = 0; g < p.G; ++g, ++row) body(row, state.seen[token].low, state.seen[token].high);
          }
        }
      };
      each_row([&](int64_t row, int64_t low, int64_t high) {
        state.alpha[row] = state.top[row];
        state.top[row] = std::max(state.top[row], p.scale * LargestScore<L>(p, state.scores + row * kTile, low, high));
      });
      for (int64_t row = begin; row < end; row += L::kCount) {
        L::Store(state.alpha + row, Exp<L>(L::Sub(L::Load(state.alpha + row), L::Load(state.top + row))));
      }
      each_row([&](int64_t row, int64_t low, int64_t high) {
        float sum = WeightsOf<L>(p, state.scores + row * kTile, state.weights + row * kTile, low, high, state.top[row]);
        state.total[row] = std::fma(state.total[row], state.alpha[row], sum);
      });
      tiles.Weigh(tile, head, state.weights + begin * kTile, state.alpha + begin, state.o + begin * V);
    }
    std::memcpy(tile.keys, tile.next, sizeof(tile.keys));
    if ((first + kTile) % kSpan != 0 && first + kTile < item.end) continue;
    if (item.spans != nullptr) break;  // the only span
    for (int64_t row = 0; row < rows; ++row) {
      AddSpan<L>(state.top[row], state.total[row], state.o + row * V, V, state.all_top + row, state.all_total + row,
                 state.all_o + row * V);
    }
    if (first + kTile < item.end) state.BeginSpan();
  }
  if (item.spans != nullptr) {
    int64_t size = kSumsBefore + V;
    float* sums = item.spans->sums + item.span * rows * size;
    for (int64_t row = 0; row < rows; ++row, sums += size) {
      sums[0] = state.top[row], sums[1] = state.total[row];
      std::memcpy(sums + kSumsBefore, state.o + row * V, V * sizeof(float));
    }
    if (item.spans->left.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    sums = item.spans->sums;
    for (int64_t span = 0; span < item.spans->count; ++span) {
      for (int64_t row = 0; row < rows; ++row, sums += size) {
        AddSpan<L>(sums[0], sums[1], sums + kSumsBefore, V, state.all_top + row, state.all_total + row, state.all_o + row * V);
      }
    }
  }
  for (int64_t head = 0, row = 0; head < item.heads; ++head) {
    for (int64_t token = 0; token < item.count; ++token) {
      for (int64_t g = 0; g < p.G; ++g, ++row) {
        tiles.Write(state.all_o + row * V, state.all_total[row], p.o + place(head, token, g) * V);
      }
    }
  }
}

}  // namespace jpaged
