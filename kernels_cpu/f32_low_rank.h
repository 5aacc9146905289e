// What adapters add, on any level whose Lanes hold 8 f32; see low_rank.h.
#pragma once

#include <cmath>

#include "low_rank.h"

namespace jpaged {

template <typename L>
class F32LowRank {
 public:
  static void Add(const float* const* h, float* const* y, int64_t count, const bf16* b, int64_t rank, int64_t N,
                  int64_t width) {
    int64_t whole = width / kOutputs * kOutputs;
    for (int64_t n = 0; n < whole; n += kOutputs) {
      for (int64_t t = 0; t < count; t += kTokens) {
        int64_t tokens = std::min(kTokens, count - t);
        auto tile = tokens == 4 ? &AddTile<4> : tokens == 3 ? &AddTile<3> : tokens == 2 ? &AddTile<2> : &AddTile<1>;
        tile(h + t, b + n, rank, N, y + t, n);
      }
    }
    for (int64_t t = 0; t < count; ++t) {
      for (int64_t n = whole; n < width; ++n) {
        float sum = 0;
        for (int64_t r = 0; r < rank; ++r) sum = std::fma(h[t][r], FromBf16(b[r * N + n]), sum);
        y[t][n] += sum;
      }
    }
  }

 private:
  static constexpr int64_t kOutputs = 2 * L::kCount, kTokens = 4;  // of a tile
  static constexpr int64_t kAhead = 128;                           // bf16 in a row of b, to be fetched from memory

  // For R tokens and the outputs from n on, whose first column of b is `b`.
  template <int R>
  static void AddTile(const float* const* h, const bf16* b, int64_t rank, int64_t N, float* const* y, int64_t n) {
    typename L::Floats sums[R][2];
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) sums[i][0] = sums[i][1] = L::Zero();
    for (int64_t r = 0; r < rank; ++r) {
      const bf16* row = b + r * N;
      PrefetchL1(row + kAhead);
      typename L::Floats left = L::FromBf16(row), right = L::FromBf16(row + L::kCount);
#pragma GCC unroll 4
      for (int i = 0; i < R; ++i) {
        typename L::Floats of_token = L::Set(h[i][r]);
        sums[i][0] = L::Fma(of_token, left, sums[i][0]);
        sums[i][1] = L::Fma(of_token, right, sums[i][1]);
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        float* to = y[i] + n + j * L::kCount;
        L::Store(to, L::Add(L::Load(to), sums[i][j]));
      }
    }
  }
};

}  // namespace jpaged
