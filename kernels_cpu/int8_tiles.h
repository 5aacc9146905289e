// The products of attention over a pool of int8 in integers, on any level whose Lanes hold 8 f32; see attend.h. Not of latents.
//
// A query becomes words in steps of a power of two: the largest it has is at least 2^14 steps (fewer by a bit for each doubling
// of D beyond 512), so a number of bf16 that is at least 2^-7 of the largest is a whole number of steps, and any is off by half a
// step at most. Weights, times the scales of values, become words in steps of a 32767th of the largest that a query has in the
// tile. Sums of products are exact: those of keys are below 2^15 * 255/256 * 2^7 * 512 < 2^31, those of a tile of values below
// 2^15 * 2^7 * 64 = 2^28. So a query's bits do not depend on the order in which they are made; scales and what a tile adds to
// those before are in f32.
//
// Bytes lie in registers as EvenBytes and OddBytes take them: of each 32 dimensions of a query or a key the even ones, then the
// odd ones. Values of two slots are zipped: pairs of both in turn. o has of each 32 dimensions, 8 at a time,
//   0 2 4 6 16 18 20 22, 1 3 5 7 17 19 21 23, 8 10 12 14 24 26 28 30, 9 11 13 15 25 27 29 31.
// Where the query rows of a head are many, a tile's keys and values become words once for all of them.
#pragma once

#include <limits>

#include "attend.h"
#include "pool_slots.h"
#include "quantized.h"

namespace jpaged {

template <typename L>
class Int8Tiles {
 public:
  using Lanes = L;
  using Slot = int8_t;
  using Weight = float;
  static constexpr int64_t kSlots = 8;
  static constexpr bool kFetches = true;

  Int8Tiles(const Problem& p, const Item& item)
      : p_(p), item_(item), D_(p.D), V_(p.V), rows_(item.count * p.G), in_place_(rows_ <= kFew) {
    static thread_local Memory q, q_steps, weights, weight_steps, scales, k, v;
    int64_t all = item.heads * rows_;
    q_ = Scratch<int16_t>(q, all * D_), q_steps_ = Scratch<float>(q_steps, all);
    weights_ = Scratch<int16_t>(weights, all * kTile), weight_steps_ = Scratch<float>(weight_steps, all);
    scales_ = Scratch<float>(scales, item.heads * 2 * kTile);
    if (in_place_) {
      zipped_ = Scratch<int8_t>(v, item.heads * kTile * V_);
    } else {
      k_ = Scratch<int16_t>(k, kTile * D_), v_ = Scratch<int16_t>(v, kTile * V_);
    }
    for (int64_t most = kWholeD; most < D_; most *= 2) steps_of_power_ /= 2;
  }

  int64_t Together() const { return in_place_ ? item_.heads : 1; }

  // NaN or infinity makes all scores of a row NaN.
  void SetQuery(int64_t row, const bf16* q) {
    float largest = LargestOf<L>(q, D_), power = FromBf16(ToBf16(largest) & 0x7f80), inverse = 0.0f, step = 0.0f;
    if (largest >= kNothing) step = power / steps_of_power_, inverse = steps_of_power_ / power;
    if (!(largest <= std::numeric_limits<float>::max())) step = std::numeric_limits<float>::quiet_NaN();
    q_steps_[row] = step;
    Floats steps = L::Set(inverse);
    int16_t* to = q_ + row * D_;
    for (int64_t d = 0; d < D_; d += kBytes, to += kBytes) {
      typename L::Words first = L::LoadWords(q + d), second = L::LoadWords(q + d + kWords);
      L::PutWholeWords(to, L::Mul(L::Even(first), steps), L::Mul(L::Even(second), steps));
      L::PutWholeWords(to + kWords, L::Mul(L::Odd(first), steps), L::Mul(L::Odd(second), steps));
    }
  }

  void Enter(const Tile<Slot>& tile) { ScalesOf<L>(p_, item_.heads, tile, 1.0f, scales_); }

  void Score(const Tile<Slot>& tile, int64_t head, float* scores) {
    if (in_place_) {
      static constexpr decltype(&Int8Tiles::template ScoreSlots<1, 8>) kBySize[] = {
          &Int8Tiles::template ScoreSlots<1, 8>, &Int8Tiles::template ScoreSlots<2, 4>, &Int8Tiles::template ScoreSlots<3, 4>,
          &Int8Tiles::template ScoreSlots<4, 2>};
      ahead_.Begin(p_, item_, tile), scales_ahead_.Begin(p_, item_.heads, tile);
      int64_t step = rows_ <= kMost ? tile.slots : kSlots;
      for (int64_t slot = 0; slot < tile.slots; slot += step) {
        for (int64_t r = 0, n; r < rows_; r += n) {
          n = std::min(Chunk(), rows_ - r);
          auto score = kBySize[n - 1];
          (this->*score)(tile, slot, slot + step, r, scores);
        }
      }
    } else {
      const int16_t* q = q_ + head * rows_ * D_;
      WidenTile(tile, head);
      for (int64_t r = 0, n; r < rows_; r += n) {
        n = std::min<int64_t>(3, rows_ - r);
        auto score = n == 3 ? &ScoreRows<3, 4> : n == 2 ? &ScoreRows<2, 4> : &ScoreRows<1, 8>;
        score(q + r * D_, k_, D_, tile.slots, scores + r * kTile);
      }
    }
    const float* steps = q_steps_ + head * rows_;
    for (int64_t i = 0; i < Together(); ++i) {
      const float* scales = scales_ + 2 * (head + i) * kTile;
      for (int64_t r = 0; r < rows_; ++r, scores += kTile, ++steps) {
        Floats step = L::Set(*steps);
        for (int64_t slot = 0; slot < kTile; slot += L::kCount) {
          L::Store(scores + slot, L::Mul(L::Load(scores + slot), L::Mul(L::Load(scales + slot), step)));
        }
      }
    }
  }

  void Weigh(const Tile<Slot>& tile, int64_t head, const float* weights, const float* alpha, float* o) {
    for (int64_t i = 0, row = 0; i < Together(); ++i) {
      const float* scales = scales_ + (2 * (head + i) + 1) * kTile;
      for (int64_t r = 0; r < rows_; ++r, ++row) weight_steps_[row] = Round(weights + row * kTile, scales, weights_ + row * kTile);
    }
    if (in_place_) {
      static constexpr decltype(&Int8Tiles::template WeighZipped<1, 2>) kBySize[] = {
          &Int8Tiles::template WeighZipped<1, 2>, &Int8Tiles::template WeighZipped<2, 2>, &Int8Tiles::template WeighZipped<3, 1>,
          &Int8Tiles::template WeighZipped<4, 1>};
      for (int64_t i = 0, row = 0; i < item_.heads; ++i) {
        for (int64_t r = 0, n; r < rows_; r += n, row += n) {
          n = std::min(Chunk(), rows_ - r);
          auto weigh = kBySize[n - 1];
          (this->*weigh)(tile.slots, i, row, r == 0, alpha + row, o + row * V_);
        }
      }
      ahead_.FetchRest();
      return;
    }
    static constexpr decltype(&WeighRows<1, 4>) kBySize[] = {&WeighRows<1, 4>, &WeighRows<2, 4>, &WeighRows<3, 2>,
                                                             &WeighRows<4, 2>, &WeighRows<5, 2>, &WeighRows<6, 2>};
    for (int64_t r = 0, n; r < rows_; r += n) {
      n = std::min<int64_t>(6, rows_ - r);
      for (int64_t d = 0, width = (n <= 2 ? 4 : 2) * L::kCount; d < V_; d += width) {
        kBySize[n - 1](weights_ + r * kTile, v_ + 2 * d, tile.slots, weight_steps_ + r, o + r * V_ + d, V_, alpha + r);
      }
    }
  }

  void Write(const float* o, float total, bf16* to) {
    Floats sum = L::Set(total);
    for (int64_t d = 0; d < V_; d += kBytes) {
      Floats parts[4];
      for (int64_t i = 0; i < 4; ++i) parts[i] = L::Div(L::Load(o + d + L::kCount * i), sum);
      L::TradeHalves(parts[0], parts[2]), L::TradeHalves(parts[1], parts[3]);
      L::PutEvenOdd(to + d, parts[0], parts[1]), L::PutEvenOdd(to + d + kWords, parts[2], parts[3]);
    }
  }

 private:
  using Floats = typename L::Floats;
  using Integers = typename L::Integers;
  using Words = typename L::Words;
  using Bytes = typename L::Bytes;
  static constexpr int64_t kWords = 2 * L::kCount, kBytes = 4 * L::kCount;  // that fill a register
  static constexpr int64_t kFew = 8;         // query rows of a head, at most, whose keys and values become words in registers
  static constexpr int64_t kMost = 4;        // query rows that share what registers hold of a slot
  static constexpr int64_t kWholeD = 512;    // dimensions of a key whose products with 16 bits of a query cannot overflow
  static constexpr float kMostSteps = 32767.0f;

  // How many query rows are multiplied at a time.
  int64_t Chunk() const { return rows_ <= kMost ? rows_ : (rows_ + 1) / 2; }

  // Makes words of a row's weights times the scales of values. Returns their step; NaN or infinity makes it so.
  static float Round(const float* weights, const float* scales, int16_t* to) {
    Floats scaled[kTile / L::kCount];
    Integers most = L::ZeroIntegers();
#pragma GCC unroll 8
    for (int64_t i = 0; i < kTile / L::kCount; ++i) {
      scaled[i] = L::Mul(L::Load(weights + L::kCount * i), L::Load(scales + L::kCount * i));
      most = L::MaxIntegers(most, L::SizesOf(scaled[i]));
    }
    int32_t sizes[L::kCount];
    L::StoreIntegers(sizes, most);
    int32_t bits = *std::max_element(sizes, sizes + L::kCount);
    float largest;
    std::memcpy(&largest, &bits, sizeof(largest));
    bool is_zero = largest < kNothing;
    Floats inverse = L::Set(is_zero ? 0.0f : kMostSteps / largest);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kTile / L::kCount; i += 2) {
      L::PutWholeWords(to + L::kCount * i, L::Mul(scaled[i], inverse), L::Mul(scaled[i + 1], inverse));
    }
    return is_zero ? 0.0f : largest / kMostSteps;
  }

  // Adds in this order: compilers that choose another one need more registers than there are.
  static void AddProducts(Integers& sum, Words a, Words b) {
    sum = L::AddPairSums(sum, a, b);
    L::KeepInRegister(sum);
  }

  // to[i] = the sum of the lanes of a[i].
  template <int count>
  static void PutSums(const Integers (&a)[count], float* to) {
#pragma GCC unroll 2
    for (int i = 0; i + 8 <= count; i += 8) {
      L::Store(to + i, L::ToFloats(L::SumsOf({a[i], a[i + 1], a[i + 2], a[i + 3], a[i + 4], a[i + 5], a[i + 6], a[i + 7]})));
    }
    if constexpr (count % 8 != 0) {
      static_assert(count % 8 == 4);
      L::PutSums(to + count - 4, a[count - 4], a[count - 3], a[count - 2], a[count - 1]);
    }
  }

  // Makes words of the keys and values of a head, slot by slot, while what is needed next comes into the cache.
  void WidenTile(const Tile<Slot>& tile, int64_t head) {
    HeadAhead<Slot> next(p_, item_, tile, head);
    int64_t offset = head * p_.Apart();
    int16_t *k = k_, *v = v_;
    for (int64_t slot = 0; slot < tile.slots; slot += 2) {
      const Slot* keys[2] = {tile.keys[slot] + offset, tile.keys[slot + 1] + offset};
      for (int64_t i = 0; i < 2; ++i) {
        next.Fetch(slot + i);
        for (int64_t d = 0; d < D_; d += kBytes, k += kBytes) {
          Bytes key = L::LoadBytes(keys[i] + d);
          L::StoreWords(k, L::EvenBytes(key)), L::StoreWords(k + kWords, L::OddBytes(key));
        }
      }
      for (int64_t d = 0; d < V_; d += kBytes, v += 2 * kBytes) {
        Bytes a = L::LoadBytes(keys[0] + p_.ValueAt() + d), b = L::LoadBytes(keys[1] + p_.ValueAt() + d);
        Bytes lower = L::ZipLower(a, b), upper = L::ZipUpper(a, b);
        L::StoreWords(v, L::EvenBytes(lower)), L::StoreWords(v + kWords, L::OddBytes(lower));
        L::StoreWords(v + 2 * kWords, L::EvenBytes(upper)), L::StoreWords(v + 3 * kWords, L::OddBytes(upper));
      }
    }
  }

  // scores[r][s] = q[r] . k[s], both in words, of R query rows and the first `slots` slots of a tile, C at a time.
  template <int R, int C>
  static void ScoreRows(const int16_t* q, const int16_t* k, int64_t D, int64_t slots, float* scores) {
    for (int64_t slot = 0; slot < slots; slot += C, k += C * D) {
      Integers acc[R][C];
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) acc[r][c] = L::ZeroIntegers();
      }
      for (int64_t d = 0; d < D; d += kWords) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          Words key = L::LoadWords(k + c * D + d);
#pragma GCC unroll 3
          for (int r = 0; r < R; ++r) AddProducts(acc[r][c], L::LoadWords(q + r * D + d), key);
        }
      }
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) PutSums(acc[r], scores + r * kTile + slot);
    }
  }

  // As ScoreRows, of the slots [slot, end) of all heads, which lie side by side, and R query rows of each from `row` on. C slots
  // are read at a time.
  template <int R, int C>
  void ScoreSlots(const Tile<Slot>& tile, int64_t slot, int64_t end, int64_t row, float* scores) {
    static_assert(R * C % 4 == 0);
    constexpr int64_t kRead = C * kBytes;
    int64_t D = D_, apart = p_.Apart(), value = p_.ValueAt(), rows = rows_, step = row == 0 ? kRead : 0;
    for (; slot < end; slot += C) {
      const Slot* keys[C];
      for (int c = 0; c < C; ++c) keys[c] = tile.keys[slot + c];
      if (row == 0) scales_ahead_.Fetch(slot, slot + C);
      const int16_t* q = q_ + row * D;
      float* to = scores + row * kTile + slot;
      for (int64_t head = 0; head < item_.heads; ++head, q += rows * D, to += rows * kTile) {
        const char* ahead = ahead_.Take(step * D / kBytes);
        Integers acc[R * C];
#pragma GCC unroll 12
        for (int i = 0; i < R * C; ++i) acc[i] = L::ZeroIntegers();
        for (int64_t d = 0; d < D; d += kBytes) {
          FetchBytes<kRead>(ahead), ahead += step;
          // First the even dimensions, then the odd ones: so few registers are in use that none goes to memory.
#pragma GCC unroll 2
          for (int part = 0; part < 2; ++part) {
            Words queries[R];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
              queries[r] = L::LoadWords(q + r * D + d + part * kWords);
              if (R * C <= 8) L::KeepInRegister(queries[r]);
            }
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
              Bytes key = L::LoadBytes(keys[c] + d);
              Words words = part == 0 ? L::EvenBytes(key) : L::OddBytes(key);
#pragma GCC unroll 4
              for (int r = 0; r < R; ++r) AddProducts(acc[r * C + c], queries[r], words);
            }
          }
        }
        float sums[R * C];
        PutSums(acc, sums);
        for (int r = 0; r < R; ++r) std::memcpy(to + r * kTile, sums + r * C, C * sizeof(float));
        if (row == 0) {
          for (int c = 0; c < C; c += 2) Zip(keys[c] + value, keys[c + 1] + value, zipped_ + (head * kTile + slot + c) * V_);
        }
        for (int c = 0; c < C; ++c) keys[c] += apart;
      }
    }
  }

  // Zips the values of two slots of a head. This is done where keys are read, so that a tile is read once, as it lies: later the
  // values of a head would be far apart, where few of them fit into the L1 cache.
  void Zip(const Slot* one, const Slot* other, int8_t* to) const {
    for (int64_t d = 0; d < V_; d += kBytes, to += 2 * kBytes) {
      Bytes a = L::LoadBytes(one + d), b = L::LoadBytes(other + d);
      L::StoreBytes(to, L::ZipLower(a, b)), L::StoreBytes(to + kBytes, L::ZipUpper(a, b));
    }
  }

  // As WeighRows, of zipped values and R query rows from `row` on, 16 C dimensions after the other.
  template <int R, int C>
  void WeighZipped(int64_t slots, int64_t head, int64_t row, bool fetches, const float* alpha, float* o) {
    constexpr int64_t kRead = C * kBytes;
    int64_t V = V_, step = fetches ? kRead : 0;
    const int16_t* weights = weights_ + row * kTile;
    for (int64_t d = 0; d < V; d += C * kWords) {
      const char* ahead = ahead_.Take(step * (slots / 2));
      Integers acc[R][2 * C];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < 2 * C; ++i) acc[r][i] = L::ZeroIntegers();
      }
      const int8_t* values = zipped_ + head * kTile * V + 2 * d;
#pragma GCC unroll 2
      for (int64_t s = 0; s < slots; s += 2, values += 2 * V) {
        FetchBytes<kRead>(ahead), ahead += step;
#pragma GCC unroll 2
        for (int i = 0; i < C; ++i) {
          Bytes both = L::LoadBytes(values + i * kBytes);
          Words even = L::EvenBytes(both), odd = L::OddBytes(both);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            Words weight = L::SetPair(weights + r * kTile + s);
            AddProducts(acc[r][2 * i], weight, even), AddProducts(acc[r][2 * i + 1], weight, odd);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) AddTile<2 * C>(acc[r], weight_steps_[row + r], alpha[r], o + r * V + d);
    }
  }

  // o = alpha * o + step * sums.
  template <int C>
  static void AddTile(const Integers (&sums)[C], float step, float alpha, float* o) {
#pragma GCC unroll 4
    for (int i = 0; i < C; ++i) {
      Floats before = L::Mul(L::Load(o + L::kCount * i), L::Set(alpha));
      L::Store(o + L::kCount * i, L::Fma(L::ToFloats(sums[i]), L::Set(step), before));
    }
  }

  // o[R][8 C] = alpha * o + step * weights . v over the first `slots` slots of a tile, whose values are in words. V: the width of
  // a value.
  template <int R, int C>
  static void WeighRows(const int16_t* weights, const int16_t* v, int64_t slots, const float* steps, float* o, int64_t V,
                        const float* alpha) {
    Integers acc[R][C];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) acc[r][i] = L::ZeroIntegers();
    }
    for (int64_t slot = 0; slot < slots; slot += 2, v += 2 * V) {
      Words values[C];
#pragma GCC unroll 4
      for (int i = 0; i < C; ++i) values[i] = L::LoadWords(v + kWords * i);
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        Words weight = L::SetPair(weights + r * kTile + slot);
#pragma GCC unroll 4
        for (int i = 0; i < C; ++i) AddProducts(acc[r][i], weight, values[i]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) AddTile<C>(acc[r], steps[r], alpha[r], o + r * V);
  }

  const Problem& p_;
  const Item& item_;
  int64_t D_, V_, rows_;  // rows: of a head
  bool in_place_;         // keys and values become words in registers
  float steps_of_power_ = 0x1p14f;  // of the power of two that a query's largest number is at least
  int16_t *q_, *k_, *v_;            // [heads][rows][D]; [kTile][D]; [kTile / 2][V][2]
  int8_t* zipped_;                  // [heads][kTile / 2][V][2]
  int16_t* weights_;                // of the heads at work, [rows][kTile]
  float *q_steps_, *weight_steps_;
  float* scales_;  // [heads][2][kTile] of keys and values
  TileAhead<Slot> ahead_;
  ScalesAhead<Slot> scales_ahead_;
};

}  // namespace jpaged
