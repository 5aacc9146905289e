// The products of attention in f32, on any level whose Lanes hold 8 f32; see attend.h. A tile's keys and values become f32
// once for all queries of an item and head, a part of them at a time, which stays in the L1 cache; where queries are few, as in
// decode, they do in registers, as they are needed. Both sum in one order. Slots that no query of a register tile sees are left
// out. Head dimensions lie as L::EvenOdd splits them: of each 16 the
// even ones, then the odd ones. Keys and values in 8 bits are multiplied as they are: scores and weights take their scales.
#pragma once

#include <type_traits>

#include "attend.h"
#include "f32_panels.h"
#include "pool_slots.h"

namespace jpaged {

template <typename L, typename Slot_>
class F32Tiles {
 public:
  using Lanes = L;
  using Slot = Slot_;
  using Weight = float;
  static constexpr int64_t kSlots = 8;
  static constexpr bool kFetches = true;

  F32Tiles(const Problem& p, const Item& item)
      : p_(p), item_(item), D_(p.D), V_(p.V), rows_(item.count * p.G), in_place_(!p.latent && rows_ <= kFew) {
    static thread_local Memory q, k, v, scales, seen;
    q_ = Scratch<float>(q, item.heads * rows_ * D_);
    if constexpr (kIsScaled) scales_ = Scratch<float>(scales, item.heads * 2 * kTile);
    if (in_place_) return;
    seen_ = Scratch<SlotRange>(seen, (rows_ + P::kRows - 1) / P::kRows);
    k_ = Scratch<float>(k, kTile * D_), v_ = p.latent ? k_ : Scratch<float>(v, kTile * kWide);
  }

  // Where keys and values become f32 in registers, all heads: what lies together is read together.
  int64_t Together() const { return in_place_ ? item_.heads : 1; }

  void SetQuery(int64_t row, const bf16* q) { Widen(q, D_, 1.0f, q_ + row * D_); }

  void Enter(const Tile<Slot>& tile) {
    if constexpr (kIsScaled) ScalesOf<L>(p_, p_.latent ? 1 : item_.heads, tile, kUnit, scales_);
  }

  void Score(const Tile<Slot>& tile, int64_t head, float* scores) {
    if (in_place_) {
      static constexpr decltype(&F32Tiles::template ScoreSlots<1, 8>) kBySize[] = {
          &F32Tiles::template ScoreSlots<1, 8>, &F32Tiles::template ScoreSlots<2, 4>, &F32Tiles::template ScoreSlots<3, 4>,
          &F32Tiles::template ScoreSlots<4, 2>};
      ahead_.Begin(p_, item_, tile);
      if constexpr (kIsScaled) scales_ahead_.Begin(p_, item_.heads, tile);
      int64_t step = rows_ <= kMost ? tile.slots : kSlots;
      for (int64_t slot = 0; slot < tile.slots; slot += step) {
        for (int64_t r = 0, n; r < rows_; r += n) {
          n = std::min(Chunk(), rows_ - r);
          auto score = kBySize[n - 1];
          (this->*score)(tile, slot, slot + step, r, scores);
        }
      }
    } else {
      const float* q = q_ + head * rows_ * D_;
      // As many keys at a time as stay in the L1 cache while all queries pass; latents are kept, as values. What is needed next comes
      // into the cache meanwhile, a few slots at a time.
      HeadAhead<Slot> next(p_, item_, tile, head);
      int64_t step = std::max<int64_t>(kSlots, kKeys / D_ / kSlots * kSlots), done = 0, fetched = 0;
      int64_t all = (tile.slots + step - 1) / step * ((rows_ + 2) / 3);
      for (int64_t slot = 0; slot < tile.slots; slot += step) {
        float* k = p_.latent ? k_ + slot * D_ : k_;
        WidenKeys(tile, head, slot, std::min(slot + step, tile.slots), k);
        for (int64_t r = 0, n; r < rows_; r += n) {
          for (++done; fetched * all < kTile * done; ++fetched) next.Fetch(fetched);
          n = std::min<int64_t>(3, rows_ - r);
          auto score = n == 3 ? &ScoreRows<3, 4> : n == 2 ? &ScoreRows<2, 4> : &ScoreRows<1, 8>;
          SlotRange seen = SeenBy(tile, r, n);
          int64_t begin = std::max(slot, seen.low), end = std::min(slot + step, seen.high);
          if (begin < end) score(q + r * D_, k + (begin - slot) * D_, D_, end - begin, scores + r * kTile + begin);
        }
      }
    }
    if (kIsScaled && !p_.latent) Scale(head, 0, scores);
  }

  void Weigh(const Tile<Slot>& tile, int64_t head, float* weights, const float* alpha, float* o) {
    if (kIsScaled && !p_.latent) Scale(head, 1, weights);
    if (in_place_) {
      static constexpr decltype(&F32Tiles::template WeighSlots<1, 2>) kBySize[] = {
          &F32Tiles::template WeighSlots<1, 2>, &F32Tiles::template WeighSlots<2, 2>, &F32Tiles::template WeighSlots<3, 1>,
          &F32Tiles::template WeighSlots<4, 1>};
      for (int64_t slot = 0, end; slot < tile.slots; slot = end) {
        end = std::min(slot + kGroup, tile.slots);
        for (int64_t r = 0, n; r < rows_; r += n) {
          n = std::min(Chunk(), rows_ - r);
          auto weigh = kBySize[n - 1];
          (this->*weigh)(tile, slot, end, r, weights, alpha, o);
        }
      }
      ahead_.FetchRest();
      return;
    }
    for (int64_t r = 0, n; r < rows_; r += n) {
      n = std::min(P::kRows, rows_ - r);
      seen_[r / P::kRows] = SeenBy(tile, r, n);
    }
    for (int64_t d = 0; d < V_; d += P::kCols) {
      if (!p_.latent && d % kWide == 0) WidenValues(tile, head, d);
      const float* v = p_.latent ? v_ + d : v_ + d % kWide * kTile;
      int64_t apart = p_.latent ? D_ : P::kCols;
      for (int64_t r = 0; r < rows_; r += P::kRows) {
        SlotRange seen = seen_[r / P::kRows];
        if (seen.low == seen.high) continue;
        kWeigh[std::min(P::kRows, rows_ - r) - 1](weights + r * kTile + seen.low, v + seen.low * apart, apart, seen.high - seen.low,
                                                  o + r * V_ + d, V_, alpha + r);
      }
    }
  }

  void Write(const float* o, float total, bf16* to) {
    typename L::Floats sum = L::Set(total);
    for (int64_t d = 0; d < V_; d += 2 * L::kCount) {
      L::PutEvenOdd(to + d, L::Div(L::Load(o + d), sum), L::Div(L::Load(o + d + L::kCount), sum));
    }
  }

 private:
  using P = F32Panels<L>;
  using Floats = typename L::Floats;
  static constexpr bool kIsScaled = sizeof(Slot) == 1;
  static constexpr float kUnit = std::is_same_v<Slot, int8_t> ? L::kInt8 : std::is_same_v<Slot, E4m3> ? L::kE4m3 : 1.0f;
  static constexpr int64_t kKeys = 4096;  // numbers of keys that become f32 together, and stay in the L1 cache
  static constexpr int64_t kWide = 32;    // dimensions of values that become f32 together: a line of bf16
  static constexpr int64_t kGroup = 32;   // slots whose values are added up before those of the next head
  static constexpr int64_t kFew = 8;      // query rows of a head, at most, whose keys and values become f32 in registers
  static constexpr int64_t kMost = 4;     // query rows that share what registers hold of a slot

  // The slots of a tile, in whole registers, that any of n query rows of a head sees, from r on.
  SlotRange SeenBy(const Tile<Slot>& tile, int64_t r, int64_t n) const {
    SlotRange all{kTile, 0};
    for (int64_t token = r / p_.G; token <= (r + n - 1) / p_.G; ++token) {
      all.low = std::min(all.low, tile.seen[token].low), all.high = std::max(all.high, tile.seen[token].high);
    }
    all.low = all.low / L::kCount * L::kCount, all.high = (all.high + L::kCount - 1) / L::kCount * L::kCount;
    return {std::min(all.low, all.high), all.high};
  }

  // How many query rows are multiplied at a time.
  int64_t Chunk() const { return rows_ <= kMost ? rows_ : (rows_ + 1) / 2; }

  // 16 values in units of kUnit: those in even places and those in odd ones.
  static void EvenOdd(const bf16* from, Floats& even, Floats& odd) { L::EvenOdd(from, even, odd); }
  static void EvenOdd(const int8_t* from, Floats& even, Floats& odd) { L::FromInt8(from, even, odd); }
  static void EvenOdd(const E4m3* from, Floats& even, Floats& odd) { L::FromE4m3(from, even, odd); }

  template <typename From>
  static void Widen(const From* from, int64_t count, float scale, float* to) {
    Floats s = L::Set(scale);
    for (int64_t d = 0; d < count; d += 2 * L::kCount) {
      Floats even, odd;
      EvenOdd(from + d, even, odd);
      if (sizeof(From) == 1 && scale != 1.0f) even = L::Mul(even, s), odd = L::Mul(odd, s);
      L::Store(to + d, even), L::Store(to + d + L::kCount, odd);
    }
  }

  // Multiplies the scores or the weights of the rows that are at work by the scales of keys (0) or of values (1).
  void Scale(int64_t head, int64_t of, float* rows) const {
    for (int64_t i = 0; i < Together(); ++i) {
      const float* scales = scales_ + (2 * (head + i) + of) * kTile;
      for (int64_t r = 0; r < rows_; ++r, rows += kTile) {
        for (int64_t slot = 0; slot < kTile; slot += L::kCount) {
          L::Store(rows + slot, L::Mul(L::Load(rows + slot), L::Load(scales + slot)));
        }
      }
    }
  }

  // Makes f32 rows of the keys of a head in the slots [slot, end).
  void WidenKeys(const Tile<Slot>& tile, int64_t head, int64_t slot, int64_t end, float* to) {
    for (; slot < end; ++slot, to += D_) {
      const Slot* key = tile.keys[slot] + head * p_.Apart();
      if (kIsScaled && p_.latent) {
        Widen(key, V_, scales_[slot], to), Widen(key + V_, D_ - V_, scales_[kTile + slot], to + V_);
      } else {
        Widen(key, D_, 1.0f, to);
      }
    }
  }

  // Makes f32 of kWide dimensions of the values of a head, from d on: panels [kTile][kCols], which all queries meet one after another.
  void WidenValues(const Tile<Slot>& tile, int64_t head, int64_t d) {
    for (int64_t slot = 0; slot < tile.slots; ++slot) {
      const Slot* value = tile.keys[slot] + head * p_.Apart() + D_ + d;
#pragma GCC unroll 2
      for (int64_t i = 0; i < kWide; i += P::kCols) Widen(value + i, P::kCols, 1.0f, v_ + i * kTile + slot * P::kCols);
    }
  }

  // scores[r][s] = q[r] . k[s] of R query rows and the first `slots` slots of a tile, C at a time.
  template <int R, int C>
  static void ScoreRows(const float* q, const float* k, int64_t D, int64_t slots, float* scores) {
    for (int64_t slot = 0; slot < slots; slot += C, k += C * D) {
      Floats acc[R][C];
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = L::Zero();
      }
      for (int64_t d = 0; d < D; d += L::kCount) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          Floats key = L::Load(k + c * D + d);
#pragma GCC unroll 3
          for (int r = 0; r < R; ++r) acc[r][c] = L::Fma(L::Load(q + r * D + d), key, acc[r][c]);
        }
      }
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int c = 0; c < C; c += 4) {
          L::PutSums(scores + r * kTile + slot + c, acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3]);
        }
      }
    }
  }

  // As ScoreRows, of the slots [slot, end) of all heads, which lie side by side, and R query rows of each from `row` on. C slots
  // are read at a time.
  template <int R, int C>
  void ScoreSlots(const Tile<Slot>& tile, int64_t slot, int64_t end, int64_t row, float* scores) {
    static_assert(R * C % 4 == 0);
    constexpr int64_t kRead = C * 2 * L::kCount * sizeof(Slot);
    int64_t D = D_, apart = p_.Apart(), rows = rows_, step = row == 0 ? kRead : 0;
    for (; slot < end; slot += C) {
      const Slot* keys[C];
      for (int c = 0; c < C; ++c) keys[c] = tile.keys[slot + c];
      if constexpr (kIsScaled) {
        if (row == 0) scales_ahead_.Fetch(slot, slot + C);
      }
      const float* q = q_ + row * D;
      float* to = scores + row * kTile + slot;
      for (int64_t head = 0; head < item_.heads; ++head, q += rows * D, to += rows * kTile) {
        const char* ahead = ahead_.Take(step * D / (2 * L::kCount));
        Floats acc[R * C];
#pragma GCC unroll 12
        for (int i = 0; i < R * C; ++i) acc[i] = L::Zero();
        for (int64_t d = 0; d < D; d += 2 * L::kCount) {
          FetchBytes<kRead>(ahead), ahead += step;
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) {
            Floats even, odd;
            EvenOdd(keys[c] + d, even, odd);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              acc[r * C + c] = L::Fma(L::Load(q + r * D + d), even, acc[r * C + c]);
              acc[r * C + c] = L::Fma(L::Load(q + r * D + d + L::kCount), odd, acc[r * C + c]);
            }
          }
        }
        float sums[R * C];
#pragma GCC unroll 3
        for (int i = 0; i < R * C; i += 4) L::PutSums(sums + i, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
        for (int r = 0; r < R; ++r) std::memcpy(to + r * kTile, sums + r * C, C * sizeof(float));
        for (int c = 0; c < C; ++c) keys[c] += apart;
      }
    }
  }

  // As WeighRows, of the slots [first, end) of all heads and R query rows of each from `row` on, 16 C dimensions after the other.
  template <int R, int C>
  void WeighSlots(const Tile<Slot>& tile, int64_t first, int64_t end, int64_t row, const float* weights,
                  const float* alpha, float* o) {
    int64_t V = V_, value = p_.ValueAt();
    constexpr int64_t kRead = C * 2 * L::kCount * sizeof(Slot);
    int64_t step = row == 0 ? kRead : 0;
    weights += row * kTile, alpha += row, o += row * V;
    for (int64_t head = 0; head < item_.heads; ++head) {
      for (int64_t d = 0; d < V; d += 2 * C * L::kCount) {
        const char* ahead = ahead_.Take(step * (end - first));
        Floats acc[R][2 * C];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int i = 0; i < 2 * C; ++i) {
            acc[r][i] = L::Load(o + r * V + d + L::kCount * i);
            if (first == 0) acc[r][i] = L::Mul(acc[r][i], L::Set(alpha[r]));
          }
        }
#pragma GCC unroll 4
        for (int64_t s = first; s < end; ++s) {
          FetchBytes<kRead>(ahead), ahead += step;
          Floats values[2 * C];
#pragma GCC unroll 2
          for (int i = 0; i < C; ++i) {
            EvenOdd(tile.keys[s] + value + d + 2 * L::kCount * i, values[2 * i], values[2 * i + 1]);
          }
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            Floats weight = L::Set(weights[r * kTile + s]);
#pragma GCC unroll 4
            for (int i = 0; i < 2 * C; ++i) acc[r][i] = L::Fma(weight, values[i], acc[r][i]);
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int i = 0; i < 2 * C; ++i) L::Store(o + r * V + d + L::kCount * i, acc[r][i]);
        }
      }
      value += p_.Apart(), weights += rows_ * kTile, alpha += rows_, o += rows_ * V;
    }
  }

  // o[R][kCols] = alpha * o + weights . v over so many slots of a tile, whose values are `apart` numbers apart. V: the width of a
  // value.
  template <int R>
  static void WeighRows(const float* weights, const float* v, int64_t apart, int64_t slots, float* o, int64_t V, const float* alpha) {
    Floats acc[R][2];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) acc[r][i] = L::Mul(L::Load(o + r * V + L::kCount * i), L::Set(alpha[r]));
    }
    P::template Accumulate<R, kTile, 1>(weights, v, apart, slots, acc);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) L::Store(o + r * V + L::kCount * i, acc[r][i]);
    }
  }

  // By numbers of query rows.
  static constexpr decltype(&WeighRows<1>) kWeigh[] = {&WeighRows<1>, &WeighRows<2>, &WeighRows<3>,
                                                       &WeighRows<4>, &WeighRows<5>, &WeighRows<6>};

  const Problem& p_;
  const Item& item_;
  int64_t D_, V_, rows_;  // rows: of a head
  bool in_place_;         // keys and values become f32 in registers
  float *q_, *k_, *v_;
  float* scales_;  // [heads][2][kTile] of keys and values, in units of kUnit; of latents [2][kTile] of the value and the rotated key
  SlotRange* seen_;  // by panels of query rows
  TileAhead<Slot> ahead_;
  ScalesAhead<Slot> scales_ahead_;  // of a pool in 8 bits
};

}  // namespace jpaged
