// Products of bf16 with AMX tiles; see linear.h, mlp.h and experts.h. The weight is the first operand, read as it lies, a group of
// 32 of its rows at a time; x, of which rows are the second operand's columns, is packed once. Sums of 32 rows of the weight by 32
// of x stay in tiles while they run along E, in one order for any number of rows.
//
// A block of x stays in the L2 cache while the weight passes. It goes past the L1 cache, where it would replace the group, which all
// of the block meets. What else there is to do goes on between the instructions that multiply, a little at a time, so that neither
// waits for the other: the sums before are written, and the next group of the weight comes towards the cache.
#pragma once

#include <type_traits>

#include "../avx512/activation.h"
#include "../avx512/lanes.h"
#include "tiles.h"

namespace jpaged::amx {

constexpr int64_t kQuarter = kSide / 4;
constexpr int64_t kGroup = 2 * kSide;  // rows of a weight
constexpr int64_t kTogether = 2;       // tiles of x, 16 rows each, that meet a group

using Sums = float[2][kSide][kSide];  // [16 rows of the weight][16 rows of x], twice

inline int64_t TilesOf(int64_t T) { return (T + kSide - 1) / kSide; }

// How many numbers T packed rows of x are.
inline int64_t Packed(int64_t T, int64_t E) { return TilesOf(T) * kSide * E; }

// In which order a sum takes its inputs, pair by pair. kOfInt4: of the four quarters of each 16 inputs the second one and the third
// one change places, as they do where a row of int4 is widened.
enum class PairOrder { kNatural, kOfInt4 };

// Returns the place of a pair of inputs.
inline int64_t PlaceOf(int64_t pair, PairOrder order) {
  return order == PairOrder::kNatural ? pair : (pair & ~6) | (pair & 2) << 1 | (pair & 4) >> 1;
}

// Packs the rows [16 i, 16 i + 16) of x as [E/2][columns][2]; past the last one that one again. row(t) is where row t begins. columns:
// 16, or T where that is less.
template <typename Row>
void PackRows(const Row& row, int64_t T, int64_t E, int64_t i, PairOrder order, int64_t columns, bf16* packed) {
  const bf16* from[kSide];
  for (int64_t t = 0; t < kSide; ++t) from[t] = row(std::min(kSide * i + t, T - 1));
  packed += kSide * i * E;
  __mmask16 mask = (1u << columns) - 1;
  for (int64_t e = 0; e < E; e += 2 * kQuarter) {
    auto put = [&](int64_t pair, __m512i words) {
      _mm512_mask_storeu_epi32(packed + PlaceOf(e / 2 + pair, order) * 2 * columns, mask, words);
    };
    __m512i x[4];
    avx512::LoadLanes([&](int64_t t) { return from[t] + e; }, x);
    avx512::TransposeLanes(x, put);
  }
}

// x packed, in memory of this thread until it packs another. columns: 16, or T where that is less.
inline const bf16* Pack(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E, PairOrder order = PairOrder::kNatural,
                        int64_t columns = kSide) {
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, Packed(T, E));
  auto row = [&](int64_t t) { return x + t * E; };
  ParallelFor(pool, TilesOf(T), [&](int64_t i) { PackRows(row, T, E, i, order, columns, packed); });
  return packed;
}

constexpr int64_t kCacheBytes = 2 << 20;  // of the L2 cache, wherever there is AMX

// Writes a cache line of a result. One of which all is larger than the cache goes past it: it would leave the cache before it is
// read, and a line that is written to without leaving comes into it first, for which the tiles would wait.
inline void PutLine(void* to, __m512i line, bool past_cache) {
  if (past_cache) {
    _mm512_stream_si512(static_cast<__m512i*>(to), line);
  } else {
    _mm512_storeu_si512(to, line);
  }
}

inline bool GoesPastCache(const void* to, int64_t row_bytes, int64_t bytes) {
  return bytes > kCacheBytes && (reinterpret_cast<uintptr_t>(to) | row_bytes) % kCacheLine == 0;
}

// Writes sums as rows of a product's result [T, N], of which y(t) is where row t begins: of a group of the weight, four rows at a time.
// kScaled: times scales of the N rows of the weight.
template <typename Y, bool kScaled>
class RowWriter {
  using Out = std::remove_pointer_t<std::invoke_result_t<Y, int64_t>>;
  static constexpr int64_t kWidth = kCacheLine / sizeof(Out);

 public:
  static constexpr int64_t Pieces() { return kSide / kQuarter; }

  RowWriter(int64_t T, int64_t N, const Y& y, const float* scales, bool past_cache)
      : T_(T), N_(N), y_(y), scales_(scales), past_cache_(past_cache) {}

  void Write(int64_t group, int64_t tile, int64_t piece, const Sums& sums) const {
    int64_t first = tile * kSide + piece * kQuarter, column = group * kGroup;
    if (first >= T_) return;
    __m512i lines[kQuarter][kLines];
    Transpose(column, piece, sums, lines);
    if (first + kQuarter <= T_ && column + kGroup <= N_) {
      PutWhole(first, column, lines);
    } else {
      PutPart(first, column, lines);
    }
  }

 private:
  static constexpr int64_t kLines = kGroup / kWidth;  // of a row

  // A row's sums of a group, for four rows of x.
  void Transpose(int64_t column, int64_t piece, const Sums& sums, __m512i (&lines)[kQuarter][kLines]) const {
    __m512i halves[2][4];
#pragma GCC unroll 2
    for (int64_t half = 0; half < 2; ++half) {
      avx512::LoadLanes([&](int64_t n) { return &sums[half][n][piece * kQuarter]; }, halves[half]);
      if constexpr (kScaled) Scale(column + half * kSide, halves[half]);
    }
    if constexpr (kLines == 2) {
      avx512::TransposeLanes(halves[0], [&](int64_t t, __m512i row) { lines[t][0] = row; });
      avx512::TransposeLanes(halves[1], [&](int64_t t, __m512i row) { lines[t][1] = row; });
    } else {
      __m512i x[4];
      // Lane l of x[i] has four sums of row 8 l + i of the group, then of row 8 l + 4 + i.
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        x[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_castsi512_ps(halves[1][i]), _mm512_castsi512_ps(halves[0][i]));
      }
      __m512i a = _mm512_unpacklo_epi16(x[0], x[1]), b = _mm512_unpackhi_epi16(x[0], x[1]);
      __m512i c = _mm512_unpacklo_epi16(x[2], x[3]), d = _mm512_unpackhi_epi16(x[2], x[3]);
      __m512i e = _mm512_unpacklo_epi32(a, c), f = _mm512_unpacklo_epi32(b, d);
      __m512i g = _mm512_unpackhi_epi32(a, c), h = _mm512_unpackhi_epi32(b, d);
      lines[0][0] = _mm512_unpacklo_epi64(e, f), lines[1][0] = _mm512_unpackhi_epi64(e, f);
      lines[2][0] = _mm512_unpacklo_epi64(g, h), lines[3][0] = _mm512_unpackhi_epi64(g, h);
    }
  }

  // Lane l of x[i] has sums of row n + 4 l + i of the weight.
  void Scale(int64_t n, __m512i (&x)[4]) const {
    __mmask16 mask = (1u << std::clamp<int64_t>(N_ - n, 0, kSide)) - 1;
    __m512 scales = _mm512_maskz_loadu_ps(mask, scales_ + n);
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      __m512 scale = _mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(i)), scales);
      x[i] = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(x[i]), scale));
    }
  }

  void PutWhole(int64_t first, int64_t column, const __m512i (&lines)[kQuarter][kLines]) const {
#pragma GCC unroll 4
    for (int64_t t = 0; t < kQuarter; ++t) {
      Out* to = y_(first + t) + column;
#pragma GCC unroll 2
      for (int64_t i = 0; i < kLines; ++i) PutLine(to + i * kWidth, lines[t][i], past_cache_);
    }
  }

  // Only rows below T and columns below N.
  void PutPart(int64_t first, int64_t column, const __m512i (&lines)[kQuarter][kLines]) const {
    for (int64_t t = 0; t < std::min(kQuarter, T_ - first); ++t) {
      for (int64_t i = 0; i < kLines; ++i) {
        int64_t n = column + i * kWidth, count = std::clamp<int64_t>(N_ - n, 0, kWidth);
        Out* to = y_(first + t) + n;
        if constexpr (kWidth == kGroup) {
          _mm512_mask_storeu_epi16(to, (1ull << count) - 1, lines[t][i]);
        } else {
          _mm512_mask_storeu_epi32(to, (1u << count) - 1, lines[t][i]);
        }
      }
    }
  }

  int64_t T_, N_;
  Y y_;
  const float* scales_;
  bool past_cache_;
};

// Rows of a result that lie together.
template <typename Out>
struct RowsOf {
  Out* first;
  int64_t N;

  Out* operator()(int64_t t) const { return first + t * N; }
};

// A writer of a result [T, N].
template <typename Out>
RowWriter<RowsOf<Out>, false> WriterOf(Out* y, int64_t T, int64_t N) {
  return {T, N, {y, N}, nullptr, GoesPastCache(y, N * sizeof(Out), T * N * sizeof(Out))};
}

// The same, of sums times the scales of the N rows of the weight.
template <typename Out>
RowWriter<RowsOf<Out>, true> WriterOf(Out* y, int64_t T, int64_t N, const float* scales) {
  return {T, N, {y, N}, scales, GoesPastCache(y, N * sizeof(Out), T * N * sizeof(Out))};
}

// Activates the sums of 16 rows of gates and of the 16 rows that these let up, and writes them as packed rows [T, F] of bf16 are, two of
// the F at a time, in the order of the weight that they meet. scales: of the gates' F rows and of the others', or null.
template <Activation kind>
class GatedWriter {
 public:
  static constexpr int64_t Pieces() { return kSide / 2; }

  GatedWriter(bf16* h, int64_t T, int64_t F, const float* scales, PairOrder order)
      : h_(h), F_(F), scales_(scales), order_(order), past_cache_(GoesPastCache(h, kCacheLine, Packed(T, F) * sizeof(bf16))) {}

  void Write(int64_t group, int64_t tile, int64_t piece, const Sums& sums) const {
    // Words of 16 bits in turn from the first half and from the second one.
    const __m512i zipped = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                            18, 2, 17, 1, 16, 0);
    __m512 even = Row(group, 2 * piece, sums), odd = Row(group, 2 * piece + 1, sums);
    // Numbers that are denormal become zeros here; a tile would take them for zeros.
    __m512i pairs = _mm512_permutexvar_epi16(zipped, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    PutLine(h_ + tile * kSide * F_ + (group * Pieces() + PlaceOf(piece, order_)) * 2 * kSide, pairs, past_cache_);
  }

 private:
  __m512 Row(int64_t group, int64_t i, const Sums& sums) const {
    __m512 gate = _mm512_load_ps(sums[0][i]), up = _mm512_load_ps(sums[1][i]);
    if (scales_ != nullptr) {
      const float* scale = scales_ + group * kSide + i;
      gate = _mm512_mul_ps(gate, _mm512_set1_ps(scale[0])), up = _mm512_mul_ps(up, _mm512_set1_ps(scale[F_]));
    }
    return avx512::Gated<kind>(gate, up);
  }

  bf16* h_;
  int64_t F_;
  const float* scales_;
  PairOrder order_;
  bool past_cache_;
};

// Work that is shared out evenly over a number of calls of Next, which say how much of it is due.
class Evenly {
 public:
  Evenly(int64_t work, int64_t calls) : work_(work), calls_(calls) {}

  template <typename Body>
  void Next(const Body& body) {
    for (due_ += work_; due_ >= calls_; due_ -= calls_) body(done_++);
  }
  template <typename Body>
  void Rest(const Body& body) {
    for (; done_ < work_; ++done_) body(done_);
  }

 private:
  int64_t work_, calls_, due_ = 0, done_ = 0;
};

// A group of a weight of bf16 as it lies: its rows begin at first[0] and first[1], 16 each, and those of the next group at next[0] and
// next[1], which come towards the cache beside all `steps` steps.
class GroupRows {
 public:
  const int64_t stride;  // bytes from row to row

  GroupRows(const bf16* const (&first)[2], const bf16* const (&next)[2], int64_t E, int64_t steps)
      : stride(E * sizeof(bf16)), first_{first[0], first[1]}, next_{next[0], next[1]}, fetched_(E / 2, steps * (E / kDepth)) {}

  const bf16* Tile(int64_t half, int64_t e) const { return first_[half] + e; }

  void Aside(int64_t, int64_t) {
    fetched_.Next([&](int64_t line) { PrefetchL2(next_[0] + line * kDepth), PrefetchL2(next_[1] + line * kDepth); });
  }

 private:
  const bf16 *first_[2], *next_[2];
  Evenly fetched_;
};

// The sums of a group and kCount tiles of packed x are in the tiles 0 to 3.
template <int kCount>
void ZeroSums() {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kCount > 1) {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int kCount>
void StoreSums(Sums* sums) {
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  if constexpr (kCount > 1) {
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
  }
}

// Adds up the products of 32 inputs: of the rows of a group, 16 from w0 on and 16 from w1 on, so many bytes apart, and of kCount tiles
// of packed x, of which the second one is at x1. kIsNear: x stays in the L1 cache, past which it goes else.
//
// A core has few tile registers beside the 8 that have names, and its two threads share them. A tile that is loaded or multiplied
// takes one until it is done, so the fewer hold sums and operands, the more loads are under way. Hence two tiles of x take 7
// of the 8, and each operand is loaded once.
template <int kCount, bool kIsNear>
void AddProducts(const bf16* w0, const bf16* w1, int64_t stride, const bf16* x, const bf16* x1, int64_t columns) {
  WriteBeforeTiles();
  if constexpr (kIsNear) {
    _tile_loadd(6, x, columns * 4);
  } else {
    _tile_stream_loadd(6, x, columns * 4);
  }
  if constexpr (kCount > 1) _tile_stream_loadd(7, x1, 64);
  _tile_loadd(4, w0, stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kCount > 1) _tile_dpbf16ps(2, 4, 7);
  _tile_loadd(4, w1, stride);
  _tile_dpbf16ps(1, 4, 6);
  if constexpr (kCount > 1) _tile_dpbf16ps(3, 4, 7);
}

// Adds up the products of kCount tiles of packed x and a group of a weight, of which w.Tile(half, e) has 16 rows of 32 inputs from
// e on. Calls aside() before each 32 inputs.
template <int kCount, typename W, typename Aside>
void MultiplyTiles(const bf16* x, const W& w, int64_t E, const Aside& aside, Sums* sums) {
  const bf16* x1 = x + kSide * E;
  ZeroSums<kCount>();
  for (int64_t e = 0; e < E; e += kDepth) {
    aside();
    AddProducts<kCount, false>(w.Tile(0, e), w.Tile(1, e), w.stride, x + e * kSide, x1 + e * kSide, kSide);
  }
  StoreSums<kCount>(sums);
}

// The same of one tile of x or two.
template <typename W, typename Aside>
void MultiplyTogether(const bf16* x, int64_t count, const W& w, int64_t E, const Aside& aside, Sums* sums) {
  if (count == kTogether) {
    MultiplyTiles<2>(x, w, E, aside, sums);
  } else {
    MultiplyTiles<1>(x, w, E, aside, sums);
  }
}

// The products of the tiles [first, last) of packed x and the groups [begin, end) of a weight, in steps of up to kTogether tiles.
//   weight.Group(group, steps)              is a group as MultiplyTiles takes it;
//   group.Aside(step, e)                    does for the next group what is due beside the 32 inputs from e on of a step;
//   result.Write(group, tile, piece, sums)  writes one of result.Pieces() parts of what becomes of the sums of a group and a tile of x.
template <typename Weight, typename Result>
void MultiplyBlock(const bf16* x, int64_t first, int64_t last, int64_t E, int64_t begin, int64_t end, const Weight& weight,
                   const Result& result) {
  alignas(kCacheLine) Sums sums[2][kTogether];
  struct {
    int64_t group = 0, tile = 0, count = 0;
  } before;  // whose sums are not written
  int64_t tiles = last - first, steps = (tiles + kTogether - 1) / kTogether, pieces = result.Pieces();
  bool turn = false;
  auto write = [&](int64_t i) {
    int64_t tile = i / pieces;
    result.Write(before.group, before.tile + tile, i % pieces, sums[!turn][tile]);
  };
  for (int64_t group = begin; group < end; ++group) {
    auto rows = weight.Group(group, steps);
    for (int64_t step = 0; step < steps; ++step, turn = !turn) {
      int64_t tile = first + tiles * step / steps, count = first + tiles * (step + 1) / steps - tile, e = 0;
      Evenly written(before.count * pieces, E / kDepth);
      auto aside = [&] {
        written.Next(write);
        rows.Aside(step, e);
        e += kDepth;
      };
      MultiplyTogether(x + tile * kSide * E, count, rows, E, aside, sums[turn]);
      written.Rest(write);
      before = {group, tile, count};
    }
  }
  for (int64_t i = 0; i < before.count * pieces; ++i) write(i);
}

// How x is cut into blocks that stay in the L2 cache while the weight passes: of whole steps, of up to so many bytes, and at least so
// many blocks where there are as many steps.
struct Blocking {
  int64_t bytes, least = 1;

  // Into how many blocks T rows are cut.
  int64_t Count(int64_t T, int64_t E) const {
    int64_t most = std::max<int64_t>(kTogether, bytes / static_cast<int64_t>(kSide * E * sizeof(bf16)));
    int64_t steps = (TilesOf(T) + kTogether - 1) / kTogether;
    return std::max((TilesOf(T) + most - 1) / most, std::min(least, steps));
  }
  // The first tile of a block.
  int64_t First(int64_t block, int64_t T, int64_t E) const {
    int64_t tiles = TilesOf(T), blocks = Count(T, E);
    return block == blocks ? tiles : tiles * block / blocks / kTogether * kTogether;
  }
};

// More than half of the cache is left for the weight and the results, and for the other thread of a core.
constexpr Blocking kBlocking{kCacheBytes * 3 / 8};

// Divides a product between threads: calls body(first, last, begin, end) for tiles of x and groups of the weight. a_thread: about how
// many items of work a thread has.
template <typename Body>
void ForBlocks(ffi::ThreadPool& pool, const Blocking& blocking, int64_t T, int64_t E, int64_t groups, int64_t a_thread, const Body& body) {
  int64_t blocks = blocking.Count(T, E), shares = (SharesOf(pool, groups, 1, a_thread) + blocks - 1) / blocks;
  ParallelFor(pool, blocks * shares, [&](int64_t item) {
    Tiles tiles_of_this_thread;
    int64_t block = item / shares, share = item % shares;
    int64_t first = blocking.First(block, T, E), last = blocking.First(block + 1, T, E);
    body(first, last, groups * share / shares, groups * (share + 1) / shares);
    _mm_sfence();  // what went past the cache is there for other threads
  });
}

}  // namespace jpaged::amx
