// Products of bf16 with AMX tiles; see linear.h, mlp.h and experts.h. The weight is the first operand, read as it lies, a group of
// 32 of its rows at a time; x, of which rows are the second operand's columns, is packed once. Sums of 32 rows of the weight by 32
// of x stay in tiles while they run along E, in one order for any number of rows.
//
// A block of x stays in the L2 cache while the weight passes. It goes past the L1 cache, where it would replace the group, which all
// of the block meets. What else there is to do goes on between the instructions that multiply, a little at a time, so that neither
// waits for the other: the sums before are written, and the next group of the weight comes towards the cache.
#pragma once

#include <type_traits>

#include "../avx512/lanes.h"
#include "../mlp.h"
#include "tiles.h"

namespace jpaged::amx {

constexpr int64_t kQuarter = kSide / 4;
constexpr int64_t kGroup = 2 * kSide;  // rows of a weight
constexpr int64_t kTogether = 2;           // tiles of x, 16 rows each, that meet a group
constexpr int64_t kTogetherWidened = 3;       // how many of them meet a group that is widened (widened.cc)

using Sums = float[2][kSide][kSide];  // [16 rows of the weight][16 rows of x], twice

inline int64_t TilesOf(int64_t T) { return (T + kSide - 1) / kSide; }

// How many numbers T packed rows of x are.
inline int64_t Packed(int64_t T, int64_t E) { return TilesOf(T) * kSide * E; }

// Packs the rows [16 i, 16 i + 16) of x as [E/2][16 rows][2]; past the last one that one again. x(t) is where row t begins.
template <typename X>
void PackRows(const X& x, int64_t T, int64_t E, int64_t i, bf16* packed) {
  const bf16* from[kSide];
  for (int64_t t = 0; t < kSide; ++t) from[t] = x(std::min(kSide * i + t, T - 1));
  packed += kSide * i * E;
  for (int64_t e = 0; e < E; e += 2 * kQuarter) {
    auto put = [&](int64_t pair, __m512i words) { _mm512_storeu_si512(packed + e * kSide + pair * kDepth, words); };
    avx512::TransposeQuarter([&](int64_t t) { return from[t] + e; }, put);
  }
}

// x packed, in memory of this thread until it packs another.
inline const bf16* Pack(ffi::ThreadPool& pool, const bf16* x, int64_t T, int64_t E) {
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, Packed(T, E));
  ParallelFor(pool, TilesOf(T), [&](int64_t i) { PackRows([&](int64_t t) { return x + t * E; }, T, E, i, packed); });
  return packed;
}

// Returns the activated pair `pair` of the 16 gates and what they let up, for 16 rows of x: rounded to bf16, as packed rows have
// them. scaled(half, i, sum): of row i of the pair's gates (half 0) or of the others.
template <Activation kind, typename Scaled>
inline __m512i GatedPairs(const Sums& sums, int64_t pair, const Scaled& scaled) {
  alignas(kCacheLine) uint32_t pairs[kSide];
  const float(&gate)[kSide][kSide] = sums[0], (&up)[kSide][kSide] = sums[1];
  for (int64_t t = 0, i = 2 * pair; t < kSide; ++t) {
    uint32_t even = ToBf16(Gated<kind>(scaled(0, 0, gate[i][t]), scaled(1, 0, up[i][t])));
    uint32_t odd = ToBf16(Gated<kind>(scaled(0, 1, gate[i + 1][t]), scaled(1, 1, up[i + 1][t])));
    pairs[t] = even | odd << 16;
  }
  return _mm512_load_si512(pairs);
}

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

// A group of a weight of bf16 as it lies: its rows begin at first[0] and first[1], 16 each.
struct GroupRows {
  static constexpr bool kIsWidened = false;
  const bf16* first[2];
  int64_t stride;  // bytes from row to row

  const bf16* Tile(int64_t half, int64_t e) const { return first[half] + e; }
};

// Adds up the products of kCount tiles of packed x and a group of a weight, of which w.Tile(half, e) has 16 rows of 32 inputs from
// e on. Calls aside() before each 32 inputs.
//
// A core has few tile registers beside the 8 that have names, and its two threads share them. A tile that is loaded or multiplied
// takes one until it is done, so the fewer hold sums and operands, the more loads are under way. Hence up to two tiles of x take 7
// of the 8, and each operand is loaded once. Where a weight is widened beside two of them, a register less is worth another load.
template <int kCount, typename W, typename Aside>
void MultiplyTiles(const bf16* x, const W& w, int64_t E, const Aside& aside, Sums* sums) {
  const bf16 *x1 = x + kSide * E, *x2 = x1 + kSide * E;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if constexpr (kCount > kTogether) {
    _tile_zero(4);
    _tile_zero(5);
  }
  for (int64_t e = 0; e < E; e += kDepth) {
    aside();
    WriteBeforeTiles();
    if constexpr (kCount == 1 || (kCount == kTogether && !W::kIsWidened)) {
      _tile_stream_loadd(6, x + e * kSide, 64);
      if constexpr (kCount > 1) _tile_stream_loadd(7, x1 + e * kSide, 64);
      _tile_loadd(4, w.Tile(0, e), w.stride);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kCount > 1) _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(4, w.Tile(1, e), w.stride);
      _tile_dpbf16ps(1, 4, 6);
      if constexpr (kCount > 1) _tile_dpbf16ps(3, 4, 7);
    } else {
      _tile_loadd(6, w.Tile(0, e), w.stride);
      _tile_loadd(7, x + e * kSide, 64);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, x1 + e * kSide, 64);
      _tile_dpbf16ps(2, 6, 7);
      if constexpr (kCount > kTogether) {
        _tile_loadd(7, x2 + e * kSide, 64);
        _tile_dpbf16ps(4, 6, 7);
      }
      _tile_loadd(6, w.Tile(1, e), w.stride);
      if constexpr (kCount > kTogether) {
        _tile_dpbf16ps(5, 6, 7);
        _tile_loadd(7, x1 + e * kSide, 64);
      }
      _tile_dpbf16ps(3, 6, 7);
      _tile_loadd(7, x + e * kSide, 64);
      _tile_dpbf16ps(1, 6, 7);
    }
  }
  _tile_stored(0, sums[0][0], 64);
  _tile_stored(1, sums[0][1], 64);
  if constexpr (kCount > 1) {
    _tile_stored(2, sums[1][0], 64);
    _tile_stored(3, sums[1][1], 64);
  }
  if constexpr (kCount > 2) {
    _tile_stored(4, sums[2][0], 64);
    _tile_stored(5, sums[2][1], 64);
  }
}

// The products of the tiles [first, last) of packed x and the groups [begin, end) of a weight. `result` says where the rows of the
// weight are, and takes the sums:
//   Rows(group, w)                    sets where two times 16 rows of a group begin;
//   Write(group, tile, piece, sums)   writes one of kPieces parts of what becomes of the sums of a group and a tile of x.
template <typename Result>
void MultiplyBlock(const bf16* x, int64_t first, int64_t last, int64_t E, int64_t begin, int64_t end, Result& result) {
  alignas(kCacheLine) Sums sums[2][kTogether];
  struct {
    int64_t group = 0, tile = 0, count = 0;
  } before;  // whose sums are not written
  int64_t tiles = last - first, steps = (tiles + kTogether - 1) / kTogether, depths = E / kDepth;
  bool turn = false;
  auto write = [&](int64_t i) {
    int64_t tile = i / Result::kPieces;
    result.Write(before.group, before.tile + tile, i % Result::kPieces, sums[!turn][tile]);
  };
  for (int64_t group = begin; group < end; ++group) {
    const bf16 *w[2], *next[2];
    result.Rows(group, w), result.Rows(group + 1, next);
    Evenly fetched(E / 2, steps * depths);
    for (int64_t step = 0; step < steps; ++step, turn = !turn) {
      int64_t tile = first + tiles * step / steps, count = first + tiles * (step + 1) / steps - tile;
      Evenly written(before.count * Result::kPieces, depths);
      auto aside = [&] {
        written.Next(write);
        fetched.Next([&](int64_t line) { PrefetchL2(next[0] + line * kDepth), PrefetchL2(next[1] + line * kDepth); });
      };
      GroupRows rows{{w[0], w[1]}, E * static_cast<int64_t>(sizeof(bf16))};
      auto multiply = [&](auto kCount) { MultiplyTiles<kCount>(x + tile * kSide * E, rows, E, aside, sums[turn]); };
      if (count == kTogether) {
        multiply(std::integral_constant<int, 2>());
      } else {
        multiply(std::integral_constant<int, 1>());
      }
      written.Rest(write);
      before = {group, tile, count};
    }
  }
  for (int64_t i = 0; i < before.count * Result::kPieces; ++i) write(i);
}

constexpr int64_t kCacheBytes = 2 << 20;  // of the L2 cache, wherever there is AMX

// How x is cut into blocks that stay in the L2 cache while the weight passes: of whole steps of so many tiles, and of so many bytes.
struct Blocking {
  int64_t together, bytes;

  // Into how many blocks T rows are cut.
  int64_t Count(int64_t T, int64_t E) const {
    int64_t most = std::max<int64_t>(together, bytes / static_cast<int64_t>(kSide * E * sizeof(bf16)));
    return (TilesOf(T) + most - 1) / most;
  }
  // The first tile of a block.
  int64_t First(int64_t block, int64_t T, int64_t E) const {
    int64_t tiles = TilesOf(T), blocks = Count(T, E);
    return block == blocks ? tiles : tiles * block / blocks / together * together;
  }
};

// More than half of the cache is left for the weight and the results, and for the other thread of a core.
constexpr Blocking kBlocking{kTogether, kCacheBytes * 3 / 8};

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

// Divides a product between threads: calls body(first, last, begin, end) for tiles of x and groups of the weight.
template <typename Body>
void ForBlocks(ffi::ThreadPool& pool, const Blocking& blocking, int64_t T, int64_t E, int64_t groups, const Body& body) {
  int64_t blocks = blocking.Count(T, E), shares = (SharesOf(pool, groups, 1) + blocks - 1) / blocks;
  ParallelFor(pool, blocks * shares, [&](int64_t item) {
    Tiles tiles_of_this_thread;
    int64_t block = item / shares, share = item % shares;
    int64_t first = blocking.First(block, T, E), last = blocking.First(block + 1, T, E);
    body(first, last, groups * share / shares, groups * (share + 1) / shares);
    _mm_sfence();  // what went past the cache is there for other threads
  });
}

}  // namespace jpaged::amx
