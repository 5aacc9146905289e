// Products with weights of e4m3 in f32, on any level whose Lanes hold 8 f32; see quantized.h. Of one row of x, weights meet it
// in registers as they are widened. Of more, those of 6 outputs and some inputs are widened into the L1 cache, once for all
// rows. An element's sum runs in one order either way.
#pragma once

#include "quantized.h"

namespace jpaged {

template <typename L>
class E4m3Products {
 public:
  static void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
    int64_t groups = (w.N + kCols - 1) / kCols, items = SharesOf(pool, groups, 4);
    auto part = w.Kind() == Scales::kRow ? MultiplyGroups<false> : MultiplyGroups<true>;
    ParallelFor(pool, items, [&](int64_t item) { part(x, w, y, T, groups * item / items, groups * (item + 1) / items); });
  }

 private:
  using Floats = typename L::Floats;
  static constexpr int64_t kRows = 2, kCols = 6;      // of a tile
  static constexpr int64_t kDepth = 512;              // inputs whose weights are widened at once
  static constexpr int64_t kPanelBytes = 256 * 1024;  // of x in f32 that stays in the L2 cache

  struct Row {  // an output's weights
    const E4m3* values;
    const float* scales;
  };

  // 32 weights from input e on, of group g: of each 16 the even ones, then the odd ones. Scaled if `scaled`; else over kE4m3.
  template <bool scaled>
  static void Widen(const Row& w, int64_t e, int64_t g, Floats (&out)[4]) {
    L::FromE4m3(w.values + e, out[0], out[1]), L::FromE4m3(w.values + e + 16, out[2], out[3]);
    if (!scaled) return;
    Floats scale = L::Mul(L::Set(w.scales[g]), L::Set(L::kE4m3));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) out[i] = L::Mul(out[i], scale);
  }

  // A thread's memory: some rows of x in f32, of each 16 the even ones first; widened weights as [inputs / 8][6][8]; sums of
  // each row of x as [6][8].
  struct Panel {
    float *x, *weights, *sums;

    Panel(int64_t rows, int64_t E) {
      static thread_local Memory memory;
      x = Scratch<float>(memory, rows * E + kCols * kDepth + rows * kCols * L::kCount);
      weights = x + rows * E, sums = weights + kCols * kDepth;
    }
  };

  static void WidenX(const bf16* from, int64_t n, float* to) {
    for (int64_t i = 0; i < n; i += 2 * L::kCount) {
      Floats even, odd;
      L::EvenOdd(from + i, even, odd);
      L::Store(to + i, even), L::Store(to + i + L::kCount, odd);
    }
  }

  // Which group an input is of, asked for whole 32s in order.
  struct Groups {
    int64_t size, g, end;
    Groups(int64_t size, int64_t first) : size(size), g(first / size), end((g + 1) * size) {}
    int64_t Of(int64_t e) {
      if (e == end) ++g, end += size;
      return g;
    }
  };

  // The sums of one row of x and 6 of w. `ahead`: bytes from one row of w to what comes next of it.
  template <bool scaled>
  static void OneRow(const float* x, const Row (&w)[kCols], int64_t E, int64_t group, int64_t ahead, float* sums) {
    Floats acc[kCols];
#pragma GCC unroll 6
    for (int j = 0; j < kCols; ++j) acc[j] = L::Zero();
    Groups groups(group, 0);
    for (int64_t e = 0; e < E; e += kPacked) {
      int64_t g = groups.Of(e);
#pragma GCC unroll 6
      for (int j = 0; j < kCols; ++j) {
        PrefetchL1((const char*)w[j].values + e + ahead);
        Floats b[4];
        Widen<scaled>(w[j], e, g, b);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) acc[j] = L::Fma(L::Load(x + e + L::kCount * i), b[i], acc[j]);
      }
    }
#pragma GCC unroll 6
    for (int j = 0; j < kCols; ++j) L::Store(sums + L::kCount * j, acc[j]);
  }

  // Adds the products of R rows of x and 6 of widened weights over `depth` inputs to their sums.
  template <int R>
  static void AddTile(const float* x, int64_t stride, const float* w, int64_t depth, float* sums) {
    Floats acc[R][kCols];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 6
      for (int j = 0; j < kCols; ++j) acc[r][j] = L::Load(sums + (r * kCols + j) * L::kCount);
    }
    for (int64_t e = 0; e < depth; e += L::kCount, w += kCols * L::kCount) {
      Floats a[R];
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) a[r] = L::Load(x + r * stride + e);
#pragma GCC unroll 6
      for (int j = 0; j < kCols; ++j) {
        Floats b = L::Load(w + j * L::kCount);
        L::KeepInRegister(b);
#pragma GCC unroll 2
        for (int r = 0; r < R; ++r) acc[r][j] = L::Fma(a[r], b, acc[r][j]);
      }
    }
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 6
      for (int j = 0; j < kCols; ++j) L::Store(sums + (r * kCols + j) * L::kCount, acc[r][j]);
    }
  }

  // The same for T rows of x, whose weights are widened first.
  template <bool scaled>
  static void SomeRows(const float* x, int64_t T, const Row (&w)[kCols], int64_t E, int64_t group, int64_t ahead,
                       const Panel& panel) {
    float *block = panel.weights, *sums = panel.sums;
    std::memset(sums, 0, T * kCols * L::kCount * sizeof(float));
    for (int64_t first = 0; first < E; first += kDepth) {
      int64_t depth = std::min(kDepth, E - first);
      for (int64_t j = 0; j < kCols; ++j) {
        Groups groups(group, first);
        for (int64_t e = 0; e < depth; e += kPacked) {
          Floats b[4];
          Widen<scaled>(w[j], first + e, groups.Of(first + e), b);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) L::Store(block + (e + L::kCount * i) * kCols + j * L::kCount, b[i]);
        }
      }
      // What comes next of w comes from memory meanwhile.
      int64_t lines = kCols * ((depth + kCacheLine - 1) / kCacheLine), tiles = (T + kRows - 1) / kRows, fetched = 0;
      for (int64_t t = 0; t < T; t += kRows) {
        for (int64_t upto = lines * (t / kRows + 1) / tiles; fetched < upto; ++fetched) {
          PrefetchL2((const char*)w[fetched % kCols].values + first + fetched / kCols * kCacheLine + ahead);
        }
        const float* rows = x + t * E + first;
        if (T - t >= kRows) {
          AddTile<kRows>(rows, E, block, depth, sums + t * kCols * L::kCount);
        } else {
          AddTile<1>(rows, E, block, depth, sums + t * kCols * L::kCount);
        }
      }
    }
  }

  // One thread's part: the groups [begin, end) of 6 outputs for all rows of x.
  template <bool scaled>
  static void MultiplyGroups(const bf16* x, const Quantized& w, float* y, int64_t T, int64_t begin, int64_t end) {
    int64_t most = std::clamp<int64_t>(kPanelBytes / (4 * w.E) / kRows * kRows, 16, 64);
    Panel panel(std::min(most, T), w.E);
    for (int64_t t = 0; t < T; t += most) {
      int64_t rows = std::min(most, T - t);
      WidenX(x + t * w.E, rows * w.E, panel.x);
      for (int64_t n = begin * kCols; n < std::min(w.N, end * kCols); n += kCols) {
        int64_t cols = std::min(kCols, w.N - n);
        Row from[kCols];  // the last one again where there are no more
        for (int64_t j = 0; j < kCols; ++j) {
          int64_t row = n + std::min(j, cols - 1);
          from[j] = {reinterpret_cast<const E4m3*>(w.Row(row)), w.scales + row * w.S};
        }
        if (rows == 1) {
          OneRow<scaled>(panel.x, from, w.E, w.Group(), kCols * w.E, panel.sums);
        } else {
          SomeRows<scaled>(panel.x, rows, from, w.E, w.Group(), kCols * w.E, panel);
        }
        for (int64_t r = 0; r < rows; ++r) {
          Floats acc[kCols];
          for (int64_t j = 0; j < kCols; ++j) acc[j] = L::Load(panel.sums + (r * kCols + j) * L::kCount);
          float sums[8];
          L::PutSums(sums, acc[0], acc[1], acc[2], acc[3]), L::PutSums(sums + 4, acc[4], acc[5], L::Zero(), L::Zero());
          for (int64_t j = 0; j < cols; ++j) {
            y[(t + r) * w.N + n + j] = scaled ? sums[j] : sums[j] * (w.scales[n + j] * L::kE4m3);
          }
        }
      }
    }
  }
};

}  // namespace jpaged
