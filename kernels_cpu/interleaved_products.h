// Products with interleaved weights of int8 and int4 (Order::kInterleaved) in integers of 16 bits (Activations::kInt16), on any
// level whose Lanes hold 8 f32. A lane is an output: a register holds 4 bytes of each of 8, and words of two inputs each are cut
// out of them, which meet the same two of a row of x in all lanes. So nothing is added up across lanes, weights come from memory
// in one stream, and what is cut out serves 4 rows of x, or all where they are many.
//
// Bytes hold numbers in excess of what they stand for, so that cutting takes no sign: sums begin with what takes that away. Sums
// of integers are exact (modulo 2^32, and what they come to fits: 2^15 * 2^7 * 256 is 2^30), those in f32 run in one order.
#pragma once

#include "quantized.h"

namespace jpaged {

template <typename L, Form form, Scales kind>
class InterleavedProducts {
 public:
  static void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
    static thread_local Memory values, scales, excess, sums;
    int64_t segment = SegmentOf(w), blocks = Cut(w.E, kBlock), segments = Cut(w.E, segment);
    Rounded from{Scratch<int16_t>(values, T * w.E), Scratch<float>(scales, T * blocks), Scratch<int32_t>(excess, T * segments),
                 Scratch<float>(sums, kind == Scales::kZeros ? T * segments : 0), T, w.E, blocks, segments};
    constexpr int64_t kAtOnce = 16;  // rows of x that are worth a thread
    ParallelFor(pool, Cut(T, kAtOnce), [&](int64_t item) {
      for (int64_t t = item * kAtOnce; t < std::min(T, (item + 1) * kAtOnce); ++t) {
        Round(x + t * w.E, segment, from.Together(t), from.From(t));
      }
    });
    int64_t groups = w.N / kInterleaved, items = SharesOf(pool, groups, 2);
    ParallelFor(pool, items,
                [&](int64_t item) { MultiplyGroups(from, w, y, T, groups * item / items, groups * (item + 1) / items); });
  }

 private:
  using Floats = typename L::Floats;
  using Words = typename L::Words;
  using Integers = typename L::Integers;
  static_assert(L::kCount == 8);
  static constexpr int64_t kRows = 4;                               // of x in a tile
  static constexpr int64_t kCols = kInterleaved / L::kCount;        // registers of outputs in a tile
  static constexpr int64_t kInputs = 8;                             // that are taken at a time
  static constexpr int64_t kBlock = 256;                            // inputs that share a scale of x
  static constexpr int64_t kPanelBytes = 256 * 1024;                // of x that stays in the L2 cache
  static constexpr int64_t kManyRows = 16;                          // of x that are worth cutting numbers of int4 out before
  static constexpr int32_t kExcess = form == Form::kInt4 ? 8 : 128;  // of a byte's numbers
  static constexpr float kMost = 32767.0f;

  static constexpr int64_t Cut(int64_t all, int64_t size) { return (all + size - 1) / size; }

  // Inputs that share a scale of w and one of x: whole 32s.
  static int64_t SegmentOf(const Quantized& w) {
    if (kind == Scales::kRow) return kBlock;
    return kBlock % w.Group() == 0 ? w.Group() : kPacked;
  }

  // x as integers: the rows of a tile lie together, [E / 2][rows][2], of each 8 inputs the even ones, then the odd ones, so that a
  // tile reads one stream; times scales, [T, blocks]. Of each segment, [T, segments], what a sum begins with, and what a zero of 1
  // takes: the sum of the integers.
  struct Rounded {
    int16_t* values;
    float* scales;
    int32_t* excess;
    float* sums;
    int64_t T, E, blocks, segments;

    // What row t has, and those after it.
    Rounded From(int64_t t) const {
      int16_t* first = values + t / kRows * kRows * E + 2 * (t % kRows);
      return {first, scales + t * blocks, excess + t * segments, sums + t * segments, T - t, E, blocks, segments};
    }
    // How many rows lie together with row t.
    int64_t Together(int64_t t) const { return std::min(kRows, T - t / kRows * kRows); }
  };

  // Rounds a row of x in blocks, each in steps of a 32767th of the largest. NaN or infinity makes a block's scale so. together: how
  // many rows it lies among.
  static void Round(const bf16* x, int64_t segment, int64_t together, const Rounded& to) {
    constexpr int64_t kWords = 2 * L::kCount;
    for (int64_t first = 0, part = 0; first < to.E; first += kBlock) {
      int64_t end = std::min(to.E, first + kBlock);
      float largest = LargestOf<L>(x + first, end - first);
      bool is_zero = largest < kNothing;
      to.scales[first / kBlock] = is_zero ? 0.0f : largest / kMost;
      Floats inverse = L::Set(is_zero ? 0.0f : kMost / largest);
      for (int64_t e = first; e < end; e += segment, ++part) {
        Integers sum = L::ZeroIntegers();
        for (int64_t i = e; i < std::min(end, e + segment); i += kWords) {
          Words words = L::LoadWords(x + i);
          Words whole = L::WholeEvenOdd(L::Mul(L::Even(words), inverse), L::Mul(L::Odd(words), inverse));
          alignas(kCacheLine) int16_t words_of_x[kWords];
          L::StoreWords(words_of_x, whole);
          for (int64_t j = 0; j < kWords; j += 2) {
            std::memcpy(to.values + (i + j) * together, words_of_x + j, 2 * sizeof(int16_t));
          }
          sum = L::AddIntegers(sum, L::PairSums(whole, L::SetWords(1)));
        }
        int32_t total = L::SumOf(sum);
        to.excess[part] = -kExcess * total;
        if (kind == Scales::kZeros) to.sums[part] = static_cast<float>(total);
      }
    }
  }

  // The next bytes of w, which come from memory while products are at work: evenly, or the processor waits for them.
  struct Ahead {
    const uint8_t* from;
    int64_t lines, at_once;

    void Fetch() {
      for (int64_t i = std::min(at_once, lines); i > 0; --i, --lines, from += kCacheLine) PrefetchL2(from);
    }
  };

  // The numbers of a pair of the four of 8 inputs, as words, of 8 outputs.
  static Words NumbersOf(const uint8_t* w, int64_t pair, int64_t c) {
    if constexpr (form == Form::kInt8) {  // a byte is a number: two lines of 4 inputs each
      Words words = L::LoadWords(w + pair % 2 * kCacheLine + c * kCacheLine / kCols);
      return pair < 2 ? L::And(words, L::SetWords(255)) : L::template ShiftRight<8>(words);
    } else {  // a byte is the numbers i and 4 + i of 8
      Words words = L::LoadWords(w + c * kCacheLine / kCols);
      words = pair == 0   ? words
              : pair == 1 ? L::template ShiftRight<4>(words)
              : pair == 2 ? L::template ShiftRight<8>(words)
                          : L::template ShiftRight<12>(words);
      return pair < 3 ? L::And(words, L::SetWords(15)) : words;
    }
  }

  // Where the numbers of 16 outputs come from: cut out as they are needed, or before, once for all rows of x.
  struct AsTheyLie {
    const uint8_t* weights;
    Words Get(int64_t e, int64_t pair, int64_t c) const { return NumbersOf(weights + kInterleaved * Bytes(form, e), pair, c); }
  };
  struct CutOut {
    const int16_t* words;  // [E / 8][4 pairs][2][8 outputs][2]
    Words Get(int64_t e, int64_t pair, int64_t c) const {
      return L::LoadWords(words + e * kInterleaved + (pair * kCols + c) * 2 * L::kCount);
    }
  };
  static void CutOutAll(const uint8_t* weights, int64_t E, int16_t* to) {
    AsTheyLie lie{weights};
    for (int64_t e = 0; e < E; e += kInputs) {
#pragma GCC unroll 4
      for (int64_t pair = 0; pair < kInputs / 2; ++pair) {
        for (int64_t c = 0; c < kCols; ++c, to += 2 * L::kCount) L::StoreWords(to, lie.Get(e, pair, c));
      }
    }
  }

  // Adds the products of the 8 inputs from e on of R rows of x, which lie together, and of 16 outputs to their sums.
  template <int R, typename Weights>
  static void AddInputs(const int16_t* x, const Weights& w, int64_t e, Integers (&sums)[R][kCols]) {
    constexpr int64_t kPairs = kInputs / 2;
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      Words numbers[kCols];
#pragma GCC unroll 2
      for (int64_t c = 0; c < kCols; ++c) numbers[c] = w.Get(e, pair, c);
#pragma GCC unroll 4
      for (int64_t r = 0; r < R; ++r) {
        Words two = L::SetPair(x + 2 * (pair * R + r));
#pragma GCC unroll 2
        for (int64_t c = 0; c < kCols; ++c) {
          sums[r][c] = L::AddIntegers(sums[r][c], L::PairSums(numbers[c], two));
          L::KeepInRegister(sums[r][c]);  // or compilers add products up before, for which there are no registers
        }
      }
    }
  }

  // The products of R rows of x and 16 outputs, from output n on.
  template <int R, typename Weights>
  static void MultiplyTile(const Rounded& x, const Quantized& w, const Weights& weights, int64_t n, int64_t segment, Ahead& ahead,
                           float* y) {
    const float *scales = w.scales + n * w.S, *zeros = kind == Scales::kZeros ? w.zeros + n * w.S : nullptr;
    Floats totals[R][kCols];
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int64_t c = 0; c < kCols; ++c) totals[r][c] = L::Zero();
    }
    int64_t group = kind == Scales::kRow ? w.E : w.Group();
    for (int64_t first = 0, part = 0; first < w.E; first += segment, ++part) {
      Integers sums[R][kCols];
#pragma GCC unroll 4
      for (int64_t r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int64_t c = 0; c < kCols; ++c) sums[r][c] = L::SetIntegers(x.excess[r * x.segments + part]);
      }
      int64_t end = std::min(w.E, first + segment);
      for (int64_t e = first; e < end; e += kPacked) {
        ahead.Fetch();
#pragma GCC unroll 1  // a loop of several of these finds no registers for its sums
        for (int64_t i = e; i < e + kPacked; i += kInputs) {
          AddInputs<R>(x.values + i * R, weights, i, sums);
        }
      }
      const float* of_group = scales + first / group * kInterleaved;
#pragma GCC unroll 4
      for (int64_t r = 0; r < R; ++r) {
        Floats scale = L::Set(x.scales[r * x.blocks + first / kBlock]);
#pragma GCC unroll 2
        for (int64_t c = 0; c < kCols; ++c) {
          Floats number = L::ToFloats(sums[r][c]);
          if constexpr (kind == Scales::kRow) {
            totals[r][c] = L::Fma(number, scale, totals[r][c]);
          } else {
            if constexpr (kind == Scales::kZeros) {
              Floats zero = L::Load(zeros + first / group * kInterleaved + c * L::kCount);
              number = L::Fnma(zero, L::Set(x.sums[r * x.segments + part]), number);
            }
            totals[r][c] = L::Fma(L::Mul(number, scale), L::Load(of_group + c * L::kCount), totals[r][c]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int64_t r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int64_t c = 0; c < kCols; ++c) {
        Floats total = totals[r][c];
        if (kind == Scales::kRow) total = L::Mul(total, L::Load(scales + c * L::kCount));
        L::Store(y + r * w.N + n + c * L::kCount, total);
      }
    }
  }

  // One thread's part: the groups [begin, end) of 16 outputs for all rows of x.
  static void MultiplyGroups(const Rounded& x, const Quantized& w, float* y, int64_t T, int64_t begin, int64_t end) {
    static thread_local Memory memory;
    int64_t panel = std::max(kRows, kPanelBytes / (2 * w.E) / kRows * kRows), segment = SegmentOf(w);
    for (int64_t first = 0; first < T; first += panel) {
      int64_t last = std::min(T, first + panel), lines = kInterleaved * w.RowBytes() / kCacheLine;
      int64_t steps = Cut(last - first, kRows) * (w.E / kPacked);
      for (int64_t g = begin; g < end; ++g) {
        int64_t n = g * kInterleaved;
        Ahead ahead{w.Row(n + kInterleaved), lines, Cut(lines, steps)};
        auto multiply = [&](auto weights) {
          using Weights = decltype(weights);
          constexpr decltype(&MultiplyTile<1, Weights>) kBySize[] = {&MultiplyTile<1, Weights>, &MultiplyTile<2, Weights>,
                                                                     &MultiplyTile<3, Weights>, &MultiplyTile<4, Weights>};
          for (int64_t t = first; t < last; t += kRows) {
            kBySize[std::min(kRows, last - t) - 1](x.From(t), w, weights, n, segment, ahead, y + t * w.N);
          }
        };
        if constexpr (form == Form::kInt4) {
          if (last - first >= kManyRows) {
            int16_t* words = Scratch<int16_t>(memory, w.E * kInterleaved);
            CutOutAll(w.Row(n), w.E, words), multiply(CutOut{words});
            continue;
          }
        }
        multiply(AsTheyLie{w.Row(n)});
      }
    }
  }
};

}  // namespace jpaged
