// The products of attention in f32, on any level whose Lanes hold 8 f32; see attend.h. A tile's keys and values become f32
// once for all queries of an item and head; where they are few, as in decode, they do in registers, as they are needed: a tile
// of f32 would not stay in the L1 cache. Both sum in one order. Head dimensions lie as L::EvenOdd splits them: of each 16 the
// even ones, then the odd ones.
#pragma once

#include "attend.h"

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
      : p_(p), item_(item), D_(p.D), V_(p.V), rows_(item.count * p.G), in_place_(kIsBf16 && !p.latent && rows_ <= kFew) {
    static thread_local Memory q, k, v;
    q_ = Scratch<float>(q, item.heads * rows_ * D_);
    if (in_place_) return;
    k_ = Scratch<float>(k, kTile * D_), v_ = p.latent ? k_ : Scratch<float>(v, kTile * V_);
  }

  // Where keys and values become f32 in registers, all heads: what lies together is read together.
  int64_t Together() const { return in_place_ ? item_.heads : 1; }

  void SetQuery(int64_t row, const bf16* q) { Widen(q, D_, q_ + row * D_); }

  void Enter(const Tile<Slot>& tile) {
    if constexpr (sizeof(Slot) == 1) {
      for (int64_t slot = 0; slot < kTile; ++slot) {  // null where the slot is not seen
        bool is_seen = tile.keys[slot] != tile.zeros;
        int64_t head = (tile.keys[slot] - static_cast<const Slot*>(p_.pool)) / p_.Width();  // of all in the pool
        scales_[slot] = is_seen ? p_.scales + 2 * head : nullptr;
      }
    }
  }

  void Score(const Tile<Slot>& tile, int64_t head, float* scores) {
    if constexpr (kIsBf16) {
      if (in_place_) {
        static constexpr decltype(&F32Tiles::template ScoreSlots<1, 8>) kBySize[] = {
            &F32Tiles::template ScoreSlots<1, 8>, &F32Tiles::template ScoreSlots<2, 4>, &F32Tiles::template ScoreSlots<3, 4>,
            &F32Tiles::template ScoreSlots<4, 2>};
        auto score = kBySize[rows_ - 1];
        return (this->*score)(tile, scores);
      }
    }
    const float* q = q_ + head * rows_ * D_;
    WidenTile(tile, head);
    for (int64_t r = 0, n; r < rows_; r += n) {
      n = std::min<int64_t>(3, rows_ - r);
      auto score = n == 3 ? &ScoreRows<3, 4> : n == 2 ? &ScoreRows<2, 4> : &ScoreRows<1, 8>;
      score(q + r * D_, k_, D_, tile.slots, scores + r * kTile);
    }
  }

  void Weigh(const Tile<Slot>& tile, int64_t, const float* weights, const float* alpha, float* o) {
    if constexpr (kIsBf16) {
      if (in_place_) {
        static constexpr decltype(&F32Tiles::template WeighSlots<1, 2>) kBySize[] = {
            &F32Tiles::template WeighSlots<1, 2>, &F32Tiles::template WeighSlots<2, 2>, &F32Tiles::template WeighSlots<3, 1>,
            &F32Tiles::template WeighSlots<4, 1>};
        auto weigh = kBySize[rows_ - 1];
        return (this->*weigh)(tile, weights, alpha, o);
      }
    }
    static constexpr decltype(&WeighRows<1, 4>) kBySize[] = {&WeighRows<1, 4>, &WeighRows<2, 4>, &WeighRows<3, 2>,
                                                             &WeighRows<4, 2>, &WeighRows<5, 2>, &WeighRows<6, 2>};
    for (int64_t r = 0, n; r < rows_; r += n) {
      n = std::min<int64_t>(6, rows_ - r);
      for (int64_t d = 0, width = n <= 2 ? 4 * L::kCount : 2 * L::kCount; d < V_; d += width) {
        kBySize[n - 1](weights + r * kTile, v_ + d, p_.latent ? D_ : V_, tile.slots, o + r * V_ + d, V_, alpha + r);
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
  using Floats = typename L::Floats;
  static constexpr bool kIsBf16 = sizeof(Slot) == sizeof(bf16);
  static constexpr int64_t kGroup = 16;  // slots whose values are added up before those of the next head
  static constexpr int64_t kFew = 4;  // query rows of a head that share what registers hold of a slot

  void Widen(const bf16* from, int64_t count, float* to) {
    for (int64_t d = 0; d < count; d += 2 * L::kCount) {
      Floats even, odd;
      L::EvenOdd(from + d, even, odd);
      L::Store(to + d, even), L::Store(to + d + L::kCount, odd);
    }
  }

  void Widen(const int8_t* from, int64_t count, float scale, float* to) {
    Floats s = L::Set(scale);
    for (int64_t d = 0; d < count; d += 2 * L::kCount) {
      Floats even, odd;
      L::EvenOdd(from + d, even, odd);
      L::Store(to + d, L::Mul(even, s)), L::Store(to + d + L::kCount, L::Mul(odd, s));
    }
  }

  // A value that is no number has a scale that is none.
  void Widen(const E4m3* from, int64_t count, float scale, float* to) {
    Floats s = L::Set(scale * L::kE4m3);
    for (int64_t d = 0; d < count; d += 2 * L::kCount) {
      Floats even, odd;
      L::FromE4m3(from + d, even, odd);
      L::Store(to + d, L::Mul(even, s)), L::Store(to + d + L::kCount, L::Mul(odd, s));
    }
  }

  // What is needed after a head of a tile: the next head of the same slots, or the next tile.
  class Next {
   public:
    Next(const F32Tiles& tiles, const Tile<Slot>& tile, int64_t head) : size_(tiles.p_.Width()) {
      bool is_last = head + 1 == tiles.item_.heads;
      slots_ = is_last ? tile.next : tile.keys, offset_ = is_last ? 0 : (head + 1) * tiles.p_.Apart();
    }
    // Brings the lines of a slot into the cache.
    void Fetch(int64_t slot) const {
      for (int64_t i = 0; i < size_; i += kCacheLine / sizeof(Slot)) PrefetchL2(slots_[slot] + offset_ + i);
    }

   private:
    const Slot* const* slots_;
    int64_t size_, offset_;
  };

  // Makes f32 of the keys and values of a head, slot by slot, while what is needed next comes into the cache.
  void WidenTile(const Tile<Slot>& tile, int64_t head) {
    Next next(*this, tile, head);
    int64_t offset = head * p_.Apart();
    for (int64_t slot = 0; slot < tile.slots; ++slot) {
      next.Fetch(slot);
      const Slot* key = tile.keys[slot] + offset;
      if constexpr (sizeof(Slot) == 1) {
        const float *of_slot = scales_[slot], zero[2] = {0.0f, 0.0f}, *pair = of_slot == nullptr ? zero : of_slot;
        if (p_.latent) {
          Widen(key, V_, pair[0], k_ + slot * D_), Widen(key + V_, D_ - V_, pair[1], k_ + slot * D_ + V_);
          continue;
        }
        if (of_slot != nullptr) pair += 2 * head;
        Widen(key, D_, pair[0], k_ + slot * D_), Widen(key + D_, V_, pair[1], v_ + slot * V_);
      } else {
        Widen(key, D_, k_ + slot * D_);
        if (!p_.latent) Widen(key + D_, V_, v_ + slot * V_);
      }
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

  // Brings half of the next tile's slots into the cache, of all heads: as large a part of them as `done` is of this tile's. It
  // is the first half or the second one. fetched: how many have been.
  void FetchNext(const Tile<Slot>& tile, int64_t half, int64_t done, int64_t& fetched) const {
    constexpr int64_t kHalf = kTile / 2;
    for (int64_t size = item_.heads * p_.Width(); fetched * tile.slots < done * kHalf; ++fetched) {
      const Slot* from = tile.next[half * kHalf + fetched];
      for (int64_t i = 0; i < size; i += kCacheLine / sizeof(Slot)) PrefetchL2(from + i);
    }
  }

  // As WidenTile and ScoreRows, C slots at a time of all heads, which lie side by side.
  template <int R, int C>
  void ScoreSlots(const Tile<Slot>& tile, float* scores) {
    static_assert(R * C % 4 == 0);
    for (int64_t slot = 0, fetched = 0; slot < tile.slots; slot += C) {
      FetchNext(tile, 0, slot + C, fetched);
      const Slot* keys[C];
      for (int c = 0; c < C; ++c) keys[c] = tile.keys[slot + c];
      const float* q = q_;
      float* to = scores + slot;
      for (int64_t head = 0; head < item_.heads; ++head, q += R * D_, to += R * kTile) {
        Floats acc[R * C];
#pragma GCC unroll 12
        for (int i = 0; i < R * C; ++i) acc[i] = L::Zero();
        for (int64_t d = 0; d < D_; d += 2 * L::kCount) {
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) {
            Floats even, odd;
            L::EvenOdd(keys[c] + d, even, odd);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              acc[r * C + c] = L::Fma(L::Load(q + r * D_ + d), even, acc[r * C + c]);
              acc[r * C + c] = L::Fma(L::Load(q + r * D_ + d + L::kCount), odd, acc[r * C + c]);
            }
          }
        }
        float sums[R * C];
#pragma GCC unroll 3
        for (int i = 0; i < R * C; i += 4) L::PutSums(sums + i, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
        for (int r = 0; r < R; ++r) std::memcpy(to + r * kTile, sums + r * C, C * sizeof(float));
        for (int c = 0; c < C; ++c) keys[c] += p_.Apart();
      }
    }
  }

  // As WeighRows, kGroup slots at a time of all heads, 16 C dimensions after the other.
  template <int R, int C>
  void WeighSlots(const Tile<Slot>& tile, const float* weights, const float* alpha, float* o) {
    for (int64_t slot = 0, fetched = 0, end; slot < tile.slots; slot = end) {
      end = std::min(slot + kGroup, tile.slots);
      FetchNext(tile, 1, end, fetched);
      int64_t value = p_.ValueAt();
      for (int64_t row = 0; row < item_.heads * R; row += R, value += p_.Apart()) {
        for (int64_t d = 0; d < V_; d += 2 * C * L::kCount) {
          Floats acc[R][2 * C];
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int i = 0; i < 2 * C; ++i) {
              acc[r][i] = L::Load(o + (row + r) * V_ + d + L::kCount * i);
              if (slot == 0) acc[r][i] = L::Mul(acc[r][i], L::Set(alpha[row + r]));
            }
          }
#pragma GCC unroll 4
          for (int64_t s = slot; s < end; ++s) {
            Floats values[2 * C];
#pragma GCC unroll 2
            for (int i = 0; i < C; ++i) {
              L::EvenOdd(tile.keys[s] + value + d + 2 * L::kCount * i, values[2 * i], values[2 * i + 1]);
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              Floats weight = L::Set(weights[(row + r) * kTile + s]);
#pragma GCC unroll 4
              for (int i = 0; i < 2 * C; ++i) acc[r][i] = L::Fma(weight, values[i], acc[r][i]);
            }
          }
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int i = 0; i < 2 * C; ++i) L::Store(o + (row + r) * V_ + d + L::kCount * i, acc[r][i]);
          }
        }
      }
    }
  }

  // o[R][8 C] = alpha * o + weights . v over the first `slots` slots of a tile, whose values are `apart` numbers apart. V: the
  // width of a value.
  template <int R, int C>
  static void WeighRows(const float* weights, const float* v, int64_t apart, int64_t slots, float* o, int64_t V,
                        const float* alpha) {
    Floats acc[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) acc[r][i] = L::Mul(L::Load(o + r * V + L::kCount * i), L::Set(alpha[r]));
    }
    for (int64_t slot = 0; slot < slots; ++slot, v += apart) {
      Floats values[C];
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) values[i] = L::Load(v + L::kCount * i);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        Floats weight = L::Set(weights[r * kTile + slot]);
#pragma GCC unroll 4
        for (int i = 0; i < C; ++i) acc[r][i] = L::Fma(weight, values[i], acc[r][i]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) L::Store(o + r * V + L::kCount * i, acc[r][i]);
    }
  }

  const Problem& p_;
  const Item& item_;
  int64_t D_, V_, rows_;  // rows: of a head
  bool in_place_;         // keys and values become f32 in registers
  float *q_, *k_, *v_;
  const float* scales_[kTile];  // of a slot's keys and values, in turn
};

}  // namespace jpaged
