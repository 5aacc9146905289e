// Products with weights in 8 and 4 bits with AVX2 and FMA; see quantized.h. Those of int8 and int4 are in integers.cc, here
// are those of fp8. Of one row of x, weights meet it in registers as they are widened. Of more, those of 6 outputs and some
// inputs are widened into the L1 cache, once for all rows. An element's sum runs in one order either way.
#include "../quantized.h"

#include <cstring>
#include <vector>

#include "../integers.h"
#include "lanes.h"

namespace jpaged {
namespace {

constexpr int64_t kRows = 2, kCols = 6;       // of a tile
constexpr int64_t kDepth = 512;               // inputs whose weights are widened at once
constexpr int64_t kPanelBytes = 256 * 1024;   // of x in f32 that stays in the L2 cache
constexpr int64_t kLine = 64;                 // bytes in a cache line

// An output's weights.
struct Row {
  const uint8_t* values;
  const float* scales;
};

// 32 weights from input e on, of group g: of each 16 the even ones, then the odd ones. Scaled if `scaled`; else a 256th of what
// they are.
template <bool scaled>
inline void Widen(const Row& w, int64_t e, int64_t g, __m256 (&out)[4]) {
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    __m256i bytes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)(w.values + e + 8 * i)));
    // Even ones in the low half as f16 of a 256th, whose exponent has a bit more: those below the normal ones come right.
    const __m256i pick = _mm256_setr_epi64x(0x0680048002800080, 0x0e800c800a800880, 0x0780058003800180, 0x0f800d800b800980);
    __m256i half = _mm256_and_si256(_mm256_srai_epi16(_mm256_shuffle_epi8(bytes, pick), 1), _mm256_set1_epi16(static_cast<short>(0xbfff)));
    out[i] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    out[i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
  }
  if (!scaled) return;
  __m256 scale = _mm256_mul_ps(_mm256_broadcast_ss(w.scales + g), _mm256_set1_ps(256.0f));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) out[i] = _mm256_mul_ps(out[i], scale);
}

// A thread's memory, in whole registers: some rows of x in f32, of each 16 the even ones first; widened weights as
// [inputs / 8][6][8]; sums of each row of x as [6][8].
struct Scratch {
  float *x, *weights, *sums;

  Scratch(int64_t rows, int64_t E) {
    static thread_local std::vector<__m256> memory;
    memory.resize((rows * E + kCols * kDepth) / kLanes + rows * kCols);
    x = reinterpret_cast<float*>(memory.data()), weights = x + rows * E, sums = weights + kCols * kDepth;
  }
};

void WidenX(const bf16* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += 2 * kLanes) {
    __m256i words = Words(from + i);
    _mm256_storeu_ps(to + i, Even(words));
    _mm256_storeu_ps(to + i + kLanes, Odd(words));
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
void OneRow(const float* x, const Row (&w)[kCols], int64_t E, int64_t group, int64_t ahead, float* sums) {
  __m256 acc[kCols];
#pragma GCC unroll 6
  for (int j = 0; j < kCols; ++j) acc[j] = _mm256_setzero_ps();
  Groups groups(group, 0);
  for (int64_t e = 0; e < E; e += kPacked) {
    int64_t g = groups.Of(e);
#pragma GCC unroll 6
    for (int j = 0; j < kCols; ++j) {
      _mm_prefetch((const char*)w[j].values + e + ahead, _MM_HINT_T0);
      __m256 b[4];
      Widen<scaled>(w[j], e, g, b);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) acc[j] = _mm256_fmadd_ps(_mm256_loadu_ps(x + e + kLanes * i), b[i], acc[j]);
    }
  }
#pragma GCC unroll 6
  for (int j = 0; j < kCols; ++j) _mm256_storeu_ps(sums + kLanes * j, acc[j]);
}

// Adds the products of R rows of x and 6 of widened weights over `depth` inputs to their sums.
template <int R>
inline void Tile(const float* x, int64_t stride, const float* w, int64_t depth, float* sums) {
  __m256 acc[R][kCols];
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 6
    for (int j = 0; j < kCols; ++j) acc[r][j] = _mm256_loadu_ps(sums + (r * kCols + j) * kLanes);
  }
  for (int64_t e = 0; e < depth; e += kLanes, w += kCols * kLanes) {
    __m256 a[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) a[r] = _mm256_loadu_ps(x + r * stride + e);
#pragma GCC unroll 6
    for (int j = 0; j < kCols; ++j) {
      __m256 b = _mm256_loadu_ps(w + j * kLanes);
      asm("" : "+x"(b));  // or compilers load it once a row, and loads are what the tile would wait for
#pragma GCC unroll 2
      for (int r = 0; r < R; ++r) acc[r][j] = _mm256_fmadd_ps(a[r], b, acc[r][j]);
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 6
    for (int j = 0; j < kCols; ++j) _mm256_storeu_ps(sums + (r * kCols + j) * kLanes, acc[r][j]);
  }
}

// The same for T rows of x, whose weights are widened first.
template <bool scaled>
void SomeRows(const float* x, int64_t T, const Row (&w)[kCols], int64_t E, int64_t group, int64_t ahead,
              const Scratch& scratch) {
  float *block = scratch.weights, *sums = scratch.sums;
  std::memset(sums, 0, T * kCols * kLanes * sizeof(float));
  for (int64_t first = 0; first < E; first += kDepth) {
    int64_t depth = std::min(kDepth, E - first);
    for (int64_t j = 0; j < kCols; ++j) {
      Groups groups(group, first);
      for (int64_t e = 0; e < depth; e += kPacked) {
        __m256 b[4];
        Widen<scaled>(w[j], first + e, groups.Of(first + e), b);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(block + (e + kLanes * i) * kCols + j * kLanes, b[i]);
      }
    }
    // What comes next of w comes from memory meanwhile.
    int64_t lines = kCols * ((depth + kLine - 1) / kLine), tiles = (T + kRows - 1) / kRows, fetched = 0;
    for (int64_t t = 0; t < T; t += kRows) {
      for (int64_t upto = lines * (t / kRows + 1) / tiles; fetched < upto; ++fetched) {
        _mm_prefetch((const char*)w[fetched % kCols].values + first + fetched / kCols * kLine + ahead, _MM_HINT_T1);
      }
      const float* rows = x + t * E + first;
      if (T - t >= kRows) {
        Tile<kRows>(rows, E, block, depth, sums + t * kCols * kLanes);
      } else {
        Tile<1>(rows, E, block, depth, sums + t * kCols * kLanes);
      }
    }
  }
}

// One thread's part: the groups [begin, end) of 6 outputs for all rows of x.
template <bool scaled>
void MultiplyGroups(const bf16* x, const Quantized& w, float* y, int64_t T, int64_t begin, int64_t end) {
  int64_t panel = std::clamp<int64_t>(kPanelBytes / (4 * w.E) / kRows * kRows, 16, 64);
  Scratch scratch(std::min(panel, T), w.E);
  for (int64_t t = 0; t < T; t += panel) {
    int64_t rows = std::min(panel, T - t);
    WidenX(x + t * w.E, rows * w.E, scratch.x);
    for (int64_t n = begin * kCols; n < std::min(w.N, end * kCols); n += kCols) {
      int64_t cols = std::min(kCols, w.N - n);
      Row from[kCols];  // the last one again where there are no more
      for (int64_t j = 0; j < kCols; ++j) {
        int64_t row = n + std::min(j, cols - 1);
        from[j] = {static_cast<const uint8_t*>(w.values) + row * w.E, w.scales + row * w.S};
      }
      if (rows == 1) {
        OneRow<scaled>(scratch.x, from, w.E, w.E / w.S, kCols * w.E, scratch.sums);
      } else {
        SomeRows<scaled>(scratch.x, rows, from, w.E, w.E / w.S, kCols * w.E, scratch);
      }
      for (int64_t r = 0; r < rows; ++r) {
        __m256 acc[kCols + 2];
        for (int64_t j = 0; j < kCols; ++j) acc[j] = _mm256_loadu_ps(scratch.sums + (r * kCols + j) * kLanes);
        acc[6] = acc[7] = _mm256_setzero_ps();
        float sums[8];
        _mm_storeu_ps(sums, Sums(acc[0], acc[1], acc[2], acc[3]));
        _mm_storeu_ps(sums + 4, Sums(acc[4], acc[5], acc[6], acc[7]));
        for (int64_t j = 0; j < cols; ++j) {
          y[(t + r) * w.N + n + j] = scaled ? sums[j] : sums[j] * (w.scales[n + j] * 256.0f);
        }
      }
    }
  }
}
}  // namespace

void Multiply(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  if (w.form != Form::kFp8) return MultiplyIntegers(pool, x, w, y, T);
  int64_t groups = (w.N + kCols - 1) / kCols;
  // Several items a thread: one that begins late is not waited for long.
  int64_t items = std::clamp<int64_t>(8 * pool.num_threads(), 1, (groups + 3) / 4);
  auto part = w.S == 1 ? MultiplyGroups<false> : MultiplyGroups<true>;
  ParallelFor(pool, items, [&](int64_t item) { part(x, w, y, T, groups * item / items, groups * (item + 1) / items); });
}
}  // namespace jpaged
