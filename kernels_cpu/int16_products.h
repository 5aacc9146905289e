// Products with weights of int8 and int4 in integers of 16 bits (Activations::kInt16), on any level whose Lanes hold 8 f32:
// AVX2 multiplies twice as many of these at a time as f32, and bytes no faster. 64 inputs are taken at a time, in four
// registers of words, x in the order in which that form's weights are widened most cheaply. Of one row of x, weights meet it
// in registers, an output after another, as memory gives them fastest. Of more, 4 outputs' are widened into the L1 cache, once
// for all rows. Sums of integers are exact and those in f32 run in one order either way.
#pragma once

#include "quantized.h"

namespace jpaged {

template <typename L, Form form, Scales kind>
class Int16Products {
 public:
  static void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
    static thread_local Memory values, scales_of_x;
    int64_t blocks = (w.E + kBlock - 1) / kBlock, stride = (w.E + kChunk - 1) / kChunk * kChunk;
    Rounded from{Scratch<int16_t>(values, T * stride), Scratch<float>(scales_of_x, T * blocks), w.E, blocks};
    constexpr int64_t kAtOnce = 16;  // rows of x that are worth a thread
    ParallelFor(pool, (T + kAtOnce - 1) / kAtOnce, [&](int64_t item) {
      for (int64_t t = item * kAtOnce; t < std::min(T, (item + 1) * kAtOnce); ++t) {
        Rounded row = from.From(t);
        Round(x + t * w.E, w.E, row.values, row.scales);
      }
    });
    int64_t groups = (w.N + kCols - 1) / kCols, items = SharesOf(pool, groups, 4);
    ParallelFor(pool, items,
                [&](int64_t item) { MultiplyGroups(from, w, y, T, groups * item / items, groups * (item + 1) / items); });
  }

 private:
  using Floats = typename L::Floats;
  using Words = typename L::Words;
  static constexpr int64_t kRows = 2, kCols = 4;      // of a tile
  static constexpr int64_t kWords = 2 * L::kCount;    // in a register
  static constexpr int64_t kChunk = 64;               // inputs that are taken at a time
  static constexpr int64_t kBlock = 256;              // inputs that share a scale of x: 2^15 * 2^7 * 256 / 8 fit into 31 bits
  static constexpr int64_t kPanelBytes = 256 * 1024;  // of x that stays in the L2 cache
  static constexpr int64_t kMostRows = 64;            // of x at a time
  static constexpr int64_t kAhead = 2048;             // bytes of weights that are asked for before one row of x needs them
  static constexpr float kMost = 32767.0f;

  struct Row {  // an output's weights, and how their integers become numbers
    const uint8_t* values;
    const float *scales, *zeros;
  };

  // x as integers, [T, E in whole 64s] with zeros at the end, times scales, [T, blocks].
  struct Rounded {
    int16_t* values;
    float* scales;
    int64_t E, blocks;

    int64_t Stride() const { return (E + kChunk - 1) / kChunk * kChunk; }
    Rounded From(int64_t t) const { return {values + t * Stride(), scales + t * blocks, E, blocks}; }
  };

  // Where in the four registers an input of 64 is. Where scales are of groups, the halves of each register are of 32 inputs
  // each, so that a half has one scale.
  static constexpr int64_t Place(int64_t i) {
    if (kind == Scales::kRow) return i;
    int64_t half = i / kPacked, inside = i % kPacked;
    if (form == Form::kInt8) return inside / 8 * kWords + 8 * half + inside % 8;
    // A word has four weights, of the places 2i, 16 + 2i, 2i + 1 and 17 + 2i in their 32.
    return (2 * (inside % 2) + inside / 16) * kWords + 8 * half + inside % 16 / 2;
  }

  // 64 weights as they lie, or the 32 at a row's end, as integers.
  static void Widen(const uint8_t* from, bool is_half, Words (&out)[4]) {
    if constexpr (form == Form::kInt4) {
      Words words = is_half ? L::HalfOfWords(from) : L::LoadWords(from), four = L::SetWords(15), eight = L::SetWords(8);
      out[0] = L::SubWords(L::And(words, four), eight);
      out[1] = L::SubWords(L::And(L::template ShiftRight<4>(words), four), eight);
      out[2] = L::SubWords(L::And(L::template ShiftRight<8>(words), four), eight);
      out[3] = L::SubWords(L::template ShiftRight<12>(words), eight);
    } else if constexpr (kind == Scales::kRow) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) out[k] = is_half && k > 1 ? L::ZeroWords() : L::WordsOf(from + kWords * k);
    } else {
#pragma GCC unroll 2
      for (int k = 0; k < 4; k += 2) {
        const uint8_t* one = from + 8 * k;
        L::WordsOf(one, is_half ? nullptr : one + kPacked, out[k], out[k + 1]);
      }
    }
  }

  // Rounds a row of x in blocks, each in steps of a 32767th of the largest. NaN or infinity makes a block's scale so.
  static void Round(const bf16* x, int64_t E, int16_t* to, float* scale) {
    alignas(kCacheLine) int16_t some[kChunk] = {};
    for (int64_t first = 0; first < E; first += kBlock) {
      int64_t end = std::min(E, first + kBlock);
      float largest = LargestOf<L>(x + first, end - first);
      bool is_zero = largest < kNothing;
      *scale++ = is_zero ? 0.0f : largest / kMost;
      Floats inverse = L::Set(is_zero ? 0.0f : kMost / largest);
      for (int64_t e = first; e < end; e += kChunk) {
        int64_t inputs = std::min(kChunk, end - e);
        for (int64_t i = 0; i < inputs; i += kWords) {
          Words words = L::LoadWords(x + e + i);
          L::PutWhole(some + i, L::Mul(L::Even(words), inverse), L::Mul(L::Odd(words), inverse));
        }
        for (int64_t i = 0; i < kChunk; ++i) to[e + Place(i)] = i < inputs ? some[i] : 0;
      }
    }
  }

  // Where the weights of an output from input e of a block on come from: widened here, or before.
  struct AsTheyLie {
    const uint8_t* values;
    void Get(int64_t e, int, bool is_half, Words (&out)[4]) const {
      const uint8_t* from = values + Bytes(form, e);
      PrefetchL1(from + kAhead);
      Widen(from, is_half, out);
    }
  };

  struct Widened {
    const int16_t* block;  // [inputs / 64][4][64]
    void Get(int64_t e, int j, bool, Words (&out)[4]) const {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) out[k] = L::LoadWords(block + e * kCols + j * kChunk + k * kWords);
    }
  };

  // Adds the products of R rows of x and C outputs over one block's inputs, which begin with input `first`, to their sums,
  // [R][4][8]. group: inputs of a scale of w, in whole 32s.
  template <int R, int C, typename Weights>
  static void AddTile(const Rounded& x, int64_t first, int64_t depth, const Weights& weights, const Row* w, int64_t group,
                      float* sums) {
    Floats acc[R][C];
    typename L::Integers whole[R][C];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) acc[r][j] = L::Zero(), whole[r][j] = L::ZeroIntegers();
    }
    int64_t stride = x.Stride();
    const int16_t* from = x.values + first;
    auto numbers = [&](int r, int64_t e, int k) { return L::LoadWords(from + r * stride + e + k * kWords); };
    int64_t g = first / group, next = (g + 1) * group - first;
    for (int64_t e = 0; e < depth; e += kChunk) {
      bool is_half = depth - e < kChunk;
      int64_t one = g, other = g;  // the groups of the first 32 inputs and of the last
      if constexpr (kind != Scales::kRow) {
        if (e == next) one = other = ++g, next += group;
        if (e + kPacked == next && !is_half) other = ++g, next += group;
      }
      [[maybe_unused]] Floats all[R];
      if constexpr (kind == Scales::kZeros) {
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          typename L::Integers sum = L::ZeroIntegers();
#pragma GCC unroll 4
          for (int k = 0; k < 4; ++k) sum = L::AddIntegers(sum, L::PairSums(numbers(r, e, k), L::SetWords(1)));
          all[r] = L::ToFloats(sum);
        }
      }
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) {
        Words b[4];
        weights.Get(e, j, is_half, b);
        L::KeepInRegisters(b);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) {
          typename L::Integers sum = kind == Scales::kRow ? whole[r][j] : L::ZeroIntegers();
#pragma GCC unroll 4
          for (int k = 0; k < 4; ++k) sum = L::AddIntegers(sum, L::PairSums(numbers(r, e, k), b[k]));
          if constexpr (kind == Scales::kRow) {
            whole[r][j] = sum;
          } else {
            Floats number = L::ToFloats(sum);
            if constexpr (kind == Scales::kZeros) {
              number = L::Fnma(L::SetHalves(w[j].zeros[one], w[j].zeros[other]), all[r], number);
            }
            acc[r][j] = L::Fma(number, L::SetHalves(w[j].scales[one], w[j].scales[other]), acc[r][j]);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      Floats scale = L::Set(x.scales[r * x.blocks + first / kBlock]);
#pragma GCC unroll 4
      for (int j = 0; j < C; ++j) {
        float* to = sums + (r * kCols + j) * L::kCount;
        Floats block = kind == Scales::kRow ? L::ToFloats(whole[r][j]) : acc[r][j];
        L::Store(to, L::Fma(block, scale, L::Load(to)));
      }
    }
  }

  // The sums of one row of x and 4 of w, [4][8].
  static void OneRow(const Rounded& x, const Row (&w)[kCols], int64_t group, float* sums) {
    for (int64_t j = 0; j < kCols; ++j) {
      for (int64_t first = 0; first < x.E; first += kBlock) {
        AsTheyLie weights{w[j].values + Bytes(form, first)};
        AddTile<1, 1>(x, first, std::min(kBlock, x.E - first), weights, w + j, group, sums + j * L::kCount);
      }
    }
  }

  // The sums of T rows of x, [T][4][8]. `ahead`: bytes from a row of w to what comes next of it.
  static void SomeRows(const Rounded& x, int64_t T, const Row (&w)[kCols], int64_t group, int64_t ahead, float* sums) {
    alignas(kCacheLine) int16_t block[kBlock * kCols];
    for (int64_t first = 0; first < x.E; first += kBlock) {
      int64_t depth = std::min(kBlock, x.E - first), begin = Bytes(form, first);
      for (int64_t e = 0; e < depth; e += kChunk) {
        for (int64_t j = 0; j < kCols; ++j) {
          Words out[4];
          Widen(w[j].values + begin + Bytes(form, e), depth - e < kChunk, out);
          for (int k = 0; k < 4; ++k) L::StoreWords(block + e * kCols + j * kChunk + k * kWords, out[k]);
        }
      }
      // What comes next of w comes from memory meanwhile.
      int64_t lines = kCols * ((Bytes(form, depth) + kCacheLine - 1) / kCacheLine), tiles = (T + kRows - 1) / kRows,
              fetched = 0;
      for (int64_t t = 0; t < T; t += kRows) {
        for (int64_t upto = lines * (t / kRows + 1) / tiles; fetched < upto; ++fetched) {
          PrefetchL2(w[fetched % kCols].values + begin + fetched / kCols * kCacheLine + ahead);
        }
        Rounded rows = x.From(t);
        float* to = sums + t * kCols * L::kCount;
        if (T - t >= kRows) {
          AddTile<kRows, kCols>(rows, first, depth, Widened{block}, w, group, to);
        } else {
          AddTile<1, kCols>(rows, first, depth, Widened{block}, w, group, to);
        }
      }
    }
  }

  // One thread's part: the groups [begin, end) of 4 outputs for all rows of x.
  static void MultiplyGroups(const Rounded& x, const Quantized& w, float* y, int64_t T, int64_t begin, int64_t end) {
    int64_t panel = std::clamp<int64_t>(kPanelBytes / (2 * w.E) / kRows * kRows, 16, kMostRows);
    alignas(kCacheLine) float sums[kMostRows * kCols * L::kCount];
    for (int64_t t = 0; t < T; t += panel) {
      int64_t rows = std::min(panel, T - t);
      Rounded some = x.From(t);
      for (int64_t n = begin * kCols; n < std::min(w.N, end * kCols); n += kCols) {
        int64_t cols = std::min(kCols, w.N - n);
        Row from[kCols];  // the last one again where there are no more
        for (int64_t j = 0; j < kCols; ++j) {
          int64_t row = n + std::min(j, cols - 1);
          from[j] = {w.Row(row), w.scales + row * w.S, w.zeros == nullptr ? nullptr : w.zeros + row * w.S};
        }
        std::memset(sums, 0, rows * kCols * L::kCount * sizeof(float));
        if (rows == 1) {
          OneRow(some, from, w.Group(), sums);
        } else {
          SomeRows(some, rows, from, w.Group(), kCols * w.RowBytes(), sums);
        }
        for (int64_t r = 0; r < rows; ++r) {
          Floats acc[kCols];
          for (int64_t j = 0; j < kCols; ++j) acc[j] = L::Load(sums + (r * kCols + j) * L::kCount);
          float totals[kCols];
          L::PutSums(totals, acc[0], acc[1], acc[2], acc[3]);
          for (int64_t j = 0; j < cols; ++j) {
            y[(t + r) * w.N + n + j] = kind == Scales::kRow ? totals[j] * from[j].scales[0] : totals[j];
          }
        }
      }
    }
  }
};

}  // namespace jpaged
