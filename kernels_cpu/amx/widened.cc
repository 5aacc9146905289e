// Products with weights in 8 and 4 bits as bf16 (Activations::kPlain) by AMX's tiles.
//
// A group of 32 rows of the weight becomes bf16 in chunks of 128 inputs, in the order in which tiles are read, while the chunk before
// is multiplied: a few rows between the instructions that multiply. Where up to 32 rows of x meet the weight, two chunks take turns in
// the L1 cache, and tiles of x have no more columns than there are rows, so that x stays there too. For more rows of x a group is kept,
// and its chunks are made beside the first 32 rows of a block.
#include "../bf16_weights.h"
#include "../mlp.h"
#include "bf16_products.h"
#include "level.h"

namespace jpaged::amx {
namespace {

using avx512::Widener;

constexpr int64_t kBlocks = 4;                   // of 32 inputs in a chunk
constexpr int64_t kChunk = kBlocks * kDepth;     // its inputs
constexpr int64_t kChunkSize = kGroup * kChunk;  // its numbers
constexpr int64_t kTileSize = kSide * kDepth;
constexpr int64_t kRowBytes = kDepth * sizeof(bf16);  // of a tile
constexpr int64_t kLeastGroups = 2;       // of an item for more than 32 rows of x
constexpr int64_t kItemsOfThread = 8;
constexpr int64_t kLeastGroupsOfFew = 4;  // of an item for fewer: its first chunk has no products beside it, and its last one no other
// Each block of x has the weight widened anew, so blocks are larger than those beside weights of bf16.
constexpr Blocking kWidenedBlocking{kCacheBytes * 9 / 16};

inline int64_t ChunksOf(int64_t E) { return (E + kChunk - 1) / kChunk; }

// Which rows of a weight a group has: 16 from step * group on, and 16 that begin `apart` rows after those.
struct Rows {
  int64_t step, apart;
};

template <Form form_, Scales kind_>
class ChunkWidener {
 public:
  static constexpr Form form = form_;
  static constexpr Scales kind = kind_;

  // A group has `step` rows that lie together, a power of two, and those of the next group come after them.
  ChunkWidener(const Quantized& w, int64_t step) : w_(w), step_(step) {
    if (kind == Scales::kRow) return;
    static thread_local Memory memory;
    scale_of_ = Scratch<int64_t>(memory, w.E / kDepth);
    for (int64_t block = 0, scale = 0, group = w.Group(); block < w.E / kDepth; ++block) {
      scale_of_[block] = scale;
      scale += (block + 1) * kDepth == (scale + 1) * group;
    }
  }

  // Makes the rows of a chunk one after another: of kChunkBlocks blocks, or where that is 0, of as many as the chunk has. The next group's
  // rows come towards the cache meanwhile, in the order in which they lie: lines that are wanted here and there take longer. A compiler
  // keeps all of it in registers where functions are inlined; it cannot know that memory stays as it is while tiles are written.
  template <int64_t kChunkBlocks>
  class RowWidener {
   public:
    // From input `first` on, from row n on.
    [[gnu::always_inline]] RowWidener(const ChunkWidener& widener, int64_t n, int64_t first, bf16* to) : to_(to) {
      const Quantized& w = widener.w_;
      int64_t step = widener.step_, row = n & (step - 1), next = n - row + step;
      int64_t turn = first / kChunk * step + row;  // each row's part of a chunk is a turn
      bytes_ = w.RowBytes(), S_ = w.S;
      from_ = w.Row(n) + Bytes(form, first), values_ahead_ = w.Row(next) + turn * kValuesAhead;
      scales_ = w.scales + n * S_, scales_ahead_ = w.scales + next * S_ + turn * kBlocks;
      if (kind == Scales::kZeros) zeros_ = w.zeros + n * S_, zeros_ahead_ = w.zeros + next * S_ + turn * kBlocks;
      blocks_ = kChunkBlocks > 0 ? kChunkBlocks : (w.E - first) / kDepth;
#pragma GCC unroll 4
      for (int64_t b = 0; kind != Scales::kRow && b < kBlocks; ++b) scale_of_[b] = b < blocks_ ? widener.scale_of_[first / kDepth + b] : 0;
    }

    // Makes two rows.
    [[gnu::always_inline]] void WidenTwo() {
      Widen();
      Widen();
    }

    // Makes a row.
    [[gnu::always_inline]] void Widen() {
      const int64_t blocks = kChunkBlocks > 0 ? kChunkBlocks : blocks_;
#pragma GCC unroll 2
      for (int64_t byte = 0; byte < kValuesAhead; byte += kCacheLine) PrefetchL2(values_ahead_ + byte);
      values_ahead_ += kValuesAhead;
      if (kind != Scales::kRow) PrefetchL2(scales_ahead_), scales_ahead_ += kBlocks;
      if (kind == Scales::kZeros) PrefetchL2(zeros_ahead_), zeros_ahead_ += kBlocks;
#pragma GCC unroll 2
      for (int64_t b = 0; b < blocks; b += 2) {
        bf16* tile = to_ + b * 2 * kTileSize;
        if constexpr (form == Form::kInt4) {
          WidenPair(from_ + Bytes(form, b * kDepth), scales_, zeros_, scale_of_ + b, b + 1 < blocks, tile);
        } else {
          WidenBlock(from_ + b * kDepth, scales_[scale_of_[b]], tile);
          if (b + 1 < blocks) WidenBlock(from_ + (b + 1) * kDepth, scales_[scale_of_[b + 1]], tile + 2 * kTileSize);
        }
      }
      to_ += kDepth, from_ += bytes_, scales_ += S_;
      if (kind == Scales::kZeros) zeros_ += S_;
    }

   private:
    const uint8_t *from_, *values_ahead_;
    const float *scales_, *scales_ahead_, *zeros_ = nullptr, *zeros_ahead_ = nullptr;
    int64_t bytes_, S_, blocks_, scale_of_[kBlocks] = {};
    bf16* to_;
  };

  // Makes the chunk from input `first` on of `count` rows from row n on.
  void Widen(int64_t n, int64_t count, int64_t first, bf16* to) const {
    if (first + kChunk <= w_.E) {
      WidenRows(RowWidener<kBlocks>(*this, n, first, to), count);
    } else {
      WidenRows(RowWidener<0>(*this, n, first, to), count);
    }
  }

 private:
  template <int64_t kChunkBlocks>
  static void WidenRows(RowWidener<kChunkBlocks> rows, int64_t count) {
    for (; count > 0; --count) rows.Widen();
  }

  // Makes 32 inputs of a row of int4 with the first scale, and the 32 after them, if there are any, with the second one. What the
  // 16 values stand for, (value - zero) * scale, is a half each of one table: rounding two halves costs as much as one does.
  static void WidenPair(const uint8_t* from, const float* scales, const float* zeros, const int64_t* scale_of, bool is_pair, bf16* to) {
    auto scaled = [&](int64_t i) {
      const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
      __m512 units = kind == Scales::kZeros ? _mm512_sub_ps(values, _mm512_set1_ps(zeros[scale_of[i]])) : values;
      return _mm512_mul_ps(units, _mm512_set1_ps(scales[scale_of[i]]));
    };
    __m512i table = (__m512i)_mm512_cvtne2ps_pbh(scaled(1), scaled(0));
    LookUp(from, table, 0, to);
    if (is_pair) LookUp(from + kPacked / 2, table, 1, to + 2 * kTileSize);
  }

  // Writes 32 numbers as entries of one half of a table, in PairOrder::kOfInt4. A permutation of bytes is one operation where that of
  // words is two; both bytes of an entry have an index, which is twice the number, and one more.
  static void LookUp(const uint8_t* from, __m512i table, int half, bf16* to) {
    // Where a byte begins that has a number in the bits 1 to 4, twice: of the lower ones of the first four bytes and of the last four of
    // eight, then of the upper ones. Register and row have eight bytes each in turn.
    const __m512i starts = _mm512_set_epi64(0x3b3b33332b2b2323, 0x3b3b33332b2b2323, 0x1b1b13130b0b0303, 0x1b1b13130b0b0303,  //
                                            0x37372f2f27271f1f, 0x37372f2f27271f1f, 0x17170f0f07073f3f, 0x17170f0f07073f3f);
    const __m512i number = _mm512_set1_epi8(0x1e), place = _mm512_set1_epi16(half == 0 ? 0x0100 : 0x2120);
    __m512i bytes = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
    __m512i shifted = _mm512_multishift_epi64_epi8(starts, bytes);
    __m512i indices = _mm512_ternarylogic_epi32(shifted, number, place, 0xea);  // (shifted & number) | place
    _mm512_store_si512(to, _mm512_permutexvar_epi8(indices, table));
  }

  // Makes 32 inputs of a row of bytes.
  static void WidenBlock(const uint8_t* from, float scale, bf16* to) {
    using Byte = std::conditional_t<form == Form::kInt8, int8_t, E4m3>;
    if constexpr (kind == Scales::kRow) {
      Widener::Exact(reinterpret_cast<const Byte*>(from), to);
    } else {
      Widener::Scaled(reinterpret_cast<const Byte*>(from), scale, to);
    }
  }

  static constexpr int64_t kValuesAhead = Bytes(form, kChunk);  // come towards the cache in a turn, and kBlocks scales

  const Quantized& w_;
  int64_t step_, *scale_of_ = nullptr;  // which of a row's scales each 32 inputs have
};

template <typename Chunks>
class WidenedGroup;

// The groups [begin, end) of a weight as bf16, chunk after chunk, of which the last `kept` are there: the first one from the beginning.
template <typename ChunkWidener>
class Chunks {
 public:
  Chunks(const Quantized& w, Rows rows, int64_t begin, int64_t end, int64_t kept)
      : widener_(w, rows.step),
        rows_(rows),
        N_(w.N),
        E_(w.E),
        begin_(begin),
        of_group_(ChunksOf(w.E)),
        count_((end - begin) * of_group_),
        kept_(kept) {
    static thread_local Memory memory;
    values_ = Scratch<bf16>(memory, kept * kChunkSize);
    Widen(0, 0, kGroup);
  }

  WidenedGroup<Chunks> Group(int64_t group, int64_t steps) const { return {*this, E_, (group - begin_) * of_group_, steps}; }

  // Returns where the inputs from e on of 16 rows lie, [16 rows][32], of the group whose first chunk is `chunk`.
  const bf16* Tile(int64_t chunk, int64_t half, int64_t e) const {
    return Place(chunk + e / kChunk) + (e % kChunk / kDepth * 2 + half) * kTileSize;
  }

  // Makes the rows [row, end) of a chunk, if there is such a chunk. Rows past the weight's last one have no output: whatever their
  // places in a tile hold will do.
  void Widen(int64_t chunk, int64_t row, int64_t end) const {
    if (rows_.apart == kSide) return WidenSpan(chunk, row, end, 0);
    if (row < kSide) WidenSpan(chunk, row, std::min(end, kSide), 0);
    if (end > kSide) WidenSpan(chunk, std::max(row, kSide), end, rows_.apart - kSide);
  }

  // The same of rows that lie together, `skipped` rows further on than their numbers say.
  void WidenSpan(int64_t chunk, int64_t row, int64_t end, int64_t skipped) const {
    if (chunk >= count_) return;
    int64_t first = chunk % of_group_ * kChunk, n = (begin_ + chunk / of_group_) * rows_.step + row + skipped;
    widener_.Widen(n, std::min(end - row, N_ - n), first, Place(chunk) + row * kDepth);
  }

 private:
  bf16* Place(int64_t chunk) const { return values_ + chunk % kept_ * kChunkSize; }

  ChunkWidener widener_;
  Rows rows_;
  int64_t N_, E_, begin_, of_group_, count_, kept_;
  bf16* values_;
};

// A group as MultiplyTiles takes it.
template <typename Chunks>
class WidenedGroup {
 public:
  static constexpr int64_t stride = kRowBytes;

  // first: its first chunk.
  WidenedGroup(const Chunks& chunks, int64_t E, int64_t first, int64_t steps) : chunks_(chunks), E_(E), first_(first), steps_(steps) {}

  const bf16* Tile(int64_t half, int64_t e) const { return chunks_.Tile(first_, half, e); }

  // The next chunk is made beside the first rows of x. The next group's first one is made beside the last rows, which do not need the
  // chunk any more whose place it takes.
  void Aside(int64_t step, int64_t e) const {
    int64_t chunk = e / kChunk, part = e % kChunk / kDepth, blocks = std::min(kChunk, E_ - chunk * kChunk) / kDepth;
    if (step != (chunk + 1 < ChunksOf(E_) ? 0 : steps_ - 1)) return;
    chunks_.Widen(first_ + chunk + 1, kGroup * part / blocks, kGroup * (part + 1) / blocks);
  }

 private:
  const Chunks& chunks_;
  int64_t E_, first_, steps_;
};

// The order in which x meets a weight.
PairOrder OrderOf(const Quantized& w) { return w.form == Form::kInt4 ? PairOrder::kOfInt4 : PairOrder::kNatural; }

// A row of x as Pack packs it alone: its pairs in their order.
const bf16* PackRow(const bf16* x, int64_t E, PairOrder order) {
  if (order == PairOrder::kNatural) return x;
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, E);
  int32_t places[kSide];
  for (int64_t pair = 0; pair < kSide; ++pair) places[PlaceOf(pair, order)] = pair;
  const __m512i from = _mm512_loadu_si512(places);
  for (int64_t e = 0; e < E; e += kDepth) _mm512_store_si512(packed + e, _mm512_permutexvar_epi32(from, _mm512_loadu_si512(x + e)));
  return packed;
}

// What becomes of the sums of a group, which has these rows of the weight, and a tile of x: written in so many pieces.
struct Result {
  const Rows rows;

  explicit Result(Rows rows) : rows(rows) {}
  virtual int64_t Pieces() const = 0;
  virtual void Write(int64_t group, int64_t tile, int64_t piece, const Sums& sums) const = 0;
};

// One that a writer of bf16_products.h writes.
template <typename Writer>
class Written : public Result {
 public:
  Written(Rows rows, const Writer& writer) : Result(rows), writer_(writer) {}

  int64_t Pieces() const override { return Writer::Pieces(); }
  void Write(int64_t group, int64_t tile, int64_t piece, const Sums& sums) const override { writer_.Write(group, tile, piece, sums); }

 private:
  Writer writer_;
};

// Calls body with what writes y [T, N], times the scales of a weight whose rows have one each.
template <typename Out, typename Body>
void WithWriter(const Quantized& w, Out* y, int64_t T, const Body& body) {
  constexpr Rows kRows{kGroup, kSide};
  if (w.Kind() == Scales::kRow) {
    body(Written(kRows, WriterOf(y, T, w.N, w.scales)));
  } else {
    body(Written(kRows, WriterOf(y, T, w.N)));
  }
}

// Adds up the products of 32 inputs as AddProducts does, and makes eight rows of the next chunk between the instructions. Each tile that
// is loaded or multiplied takes a tile register, and the other thread of a core may leave so few of them that it waits until the one
// before is done. What has nothing to do with tiles goes on meanwhile.
template <int kCount, typename RowWidener>
[[gnu::always_inline]] inline void AddProductsBeside(const bf16* tiles, const bf16* x, const bf16* x1, int64_t columns, RowWidener& rows) {
  WriteBeforeTiles();
  if constexpr (kCount == 1) {
    _tile_loadd(6, x, columns * 4);
  } else {
    _tile_stream_loadd(6, x, columns * 4);
    _tile_stream_loadd(7, x1, 64);
  }
  rows.WidenTwo();
  _tile_loadd(4, tiles, kRowBytes);
  rows.WidenTwo();
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kCount > 1) _tile_dpbf16ps(2, 4, 7);
  _tile_loadd(5, tiles + kTileSize, kRowBytes);
  rows.WidenTwo();
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (kCount > 1) _tile_dpbf16ps(3, 5, 7);
  rows.WidenTwo();
}

// The products of kCount tiles of packed x, which have so many columns, and the groups [begin, end) of w, whose rows lie together. Few
// rows of x leave little time beside each row of the weight, so nothing is asked for that only more rows need.
template <typename Widener, int kCount>
void MultiplyFew(const bf16* x, int64_t columns, const Quantized& w, const Result& result, int64_t begin, int64_t end) {
  static thread_local Memory memory;
  bf16 *now = Scratch<bf16>(memory, 2 * kChunkSize), *next = now + kChunkSize;
  const Widener widener(w, kGroup);
  // Makes a group's chunk. Rows past the weight's last one have no output.
  auto widen = [&](int64_t group, int64_t first, bf16* to) {
    widener.Widen(group * kGroup, std::min(kGroup, w.N - group * kGroup), first, to);
  };
  widen(begin, 0, now);
  // Writers read whole quarters of a tile's columns, also those that it does not have: a denormal number left there by another function
  // would cost a product with it more than 100 cycles.
  alignas(kCacheLine) Sums sums[kCount] = {};
  for (int64_t group = begin; group < end; ++group) {
    ZeroSums<kCount>();
    for (int64_t first = 0; first < w.E; first += kChunk) {
      bool is_last = first + kChunk >= w.E;
      int64_t blocks = is_last ? (w.E - first) / kDepth : kBlocks;
      int64_t group_ahead = group + is_last, first_ahead = is_last ? 0 : first + kChunk;  // of the next chunk
      bool is_ahead = group_ahead < end, is_whole = first_ahead + kChunk <= w.E && (group_ahead + 1) * kGroup <= w.N;
      const bf16* of_x = x + first * columns;
      if (is_ahead && is_whole && blocks == kBlocks) {
        typename Widener::template RowWidener<kBlocks> rows(widener, group_ahead * kGroup, first_ahead, next);
        for (int64_t block = 0; block < kBlocks; ++block, of_x += kDepth * columns) {
          AddProductsBeside<kCount>(now + block * 2 * kTileSize, of_x, of_x + kSide * w.E, columns, rows);
        }
      } else {
        if (is_ahead) widen(group_ahead, first_ahead, next);
        for (int64_t block = 0; block < blocks; ++block, of_x += kDepth * columns) {
          const bf16* tiles = now + block * 2 * kTileSize;
          AddProducts<kCount, kCount == 1>(tiles, tiles + kTileSize, kRowBytes, of_x, of_x + kSide * w.E, columns);
        }
      }
      std::swap(now, next);
    }
    StoreSums<kCount>(sums);
    for (int64_t tile = 0; tile < kCount; ++tile) {
      for (int64_t piece = 0; piece < result.Pieces(); ++piece) result.Write(group, tile, piece, sums[tile]);
    }
  }
}

// The products of the tiles [first, last) of packed x and the groups [begin, end) of w.
template <typename ChunkWidener>
void MultiplyGroups(const bf16* x, const Quantized& w, const Result& result, int64_t first, int64_t last, int64_t begin, int64_t end) {
  int64_t kept = last - first <= kTogether ? 2 : std::max<int64_t>(2, ChunksOf(w.E));
  Chunks<ChunkWidener> chunks(w, result.rows, begin, end, kept);
  MultiplyBlock(x, first, last, w.E, begin, end, chunks, result);
}

template <Form form, Scales kind>
struct Kind {
  using Widener = ChunkWidener<form, kind>;
};

// Calls body with what widens a weight, as a type.
template <typename Body>
void WithWidener(const Quantized& w, const Body& body) {
  if (w.Kind() == Scales::kZeros) return body(Kind<Form::kInt4, Scales::kZeros>());
  if (w.form == Form::kInt4) return body(Kind<Form::kInt4, Scales::kGroups>());
  if (w.form == Form::kInt8 && w.Kind() == Scales::kRow) return body(Kind<Form::kInt8, Scales::kRow>());
  if (w.form == Form::kInt8) return body(Kind<Form::kInt8, Scales::kGroups>());
  if (w.Kind() == Scales::kRow) return body(Kind<Form::kE4m3, Scales::kRow>());
  body(Kind<Form::kE4m3, Scales::kGroups>());
}

// The products of packed x and all groups of w.
void MultiplyPacked(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, const Result& result, int64_t T) {
  void (*multiply)(const bf16*, const Quantized&, const Result&, int64_t, int64_t, int64_t, int64_t);
  WithWidener(w, [&](auto kind) { multiply = &MultiplyGroups<typename decltype(kind)::Widener>; });
  int64_t groups = (w.N + kGroup - 1) / kGroup;
  // What is made before the first products of an item begin has nothing beside it, so for many rows of x an item has several groups.
  int64_t least = TilesOf(T) > kTogether ? kLeastGroups : 1;
  auto work = [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
    multiply(x, w, result, first, last, begin * least, std::min(end * least, groups));
  };
  ForBlocks(pool, kWidenedBlocking, T, w.E, (groups + least - 1) / least, kItemsOfThread, work);
}

// y of up to kTogether tiles of x.
template <typename Out>
void MultiplyFew(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Out* y, int64_t T) {
  void (*multiply)(const bf16*, int64_t, const Quantized&, const Result&, int64_t, int64_t);
  WithWidener(w, [&](auto kind) {
    using Widener = typename decltype(kind)::Widener;
    multiply = T <= kSide ? &MultiplyFew<Widener, 1> : &MultiplyFew<Widener, kTogether>;
  });
  int64_t columns = std::min(T, kSide), groups = (w.N + kGroup - 1) / kGroup, items = SharesOf(pool, groups, kLeastGroupsOfFew);
  const bf16* packed = T == 1 ? PackRow(x, w.E, OrderOf(w)) : Pack(pool, x, T, w.E, OrderOf(w), columns);
  WithWriter(w, y, T, [&](const Result& result) {
    ParallelFor(pool, items, [&](int64_t item) {
      Tiles tiles_of_this_thread(columns);
      multiply(packed, columns, w, result, groups * item / items, groups * (item + 1) / items);
      _mm_sfence();  // what went past the cache is there for other threads
    });
  });
}

template <Activation kind>
const bf16* MultiplyGated(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, PairOrder order, int64_t T) {
  static thread_local Memory memory;
  bf16* h = Scratch<bf16>(memory, Packed(T, w.N / 2));
  Written result({kSide, w.N / 2}, GatedWriter<kind>(h, T, w.N / 2, w.Kind() == Scales::kRow ? w.scales : nullptr, order));
  MultiplyPacked(pool, x, w, result, T);
  return h;
}

// y [T, N] of packed x.
template <typename Out>
void MultiplyPacked(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Out* y, int64_t T) {
  WithWriter(w, y, T, [&](const Result& result) { MultiplyPacked(pool, x, w, result, T); });
}

template <typename Out>
void MultiplyTo(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, Out* y, int64_t T) {
  if (0 < T && TilesOf(T) <= kTogether) return MultiplyFew(pool, x, w, y, T);
  if (T > 0) MultiplyPacked(pool, Pack(pool, x, T, w.E, OrderOf(w)), w, y, T);
}

template <typename Out>
bool MlpTo(ffi::ThreadPool& pool, Activation kind, const bf16* x, const Quantized& gate_up, const Quantized& down, Out* y, int64_t T) {
  // For fewer rows most of what a tile of x has activated would be padding.
  if (TilesOf(T) < kTogether || gate_up.N % kGroup != 0) return false;
  auto gated = kind == Activation::kSilu ? &MultiplyGated<Activation::kSilu> : &MultiplyGated<Activation::kGeluTanh>;
  MultiplyPacked(pool, gated(pool, Pack(pool, x, T, gate_up.E, OrderOf(gate_up)), gate_up, OrderOf(down), T), down, y, T);
  return true;
}
}  // namespace

void MultiplyPlain(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) { MultiplyTo(pool, x, w, y, T); }

void MultiplyPlain(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, bf16* y, int64_t T) { MultiplyTo(pool, x, w, y, T); }

bool MlpPlain(ffi::ThreadPool& pool, Activation kind, const bf16* x, const Quantized& gate_up, const Quantized& down, float* y, int64_t T) {
  return MlpTo(pool, kind, x, gate_up, down, y, T);
}

bool MlpPlain(ffi::ThreadPool& pool, Activation kind, const bf16* x, const Quantized& gate_up, const Quantized& down, bf16* y, int64_t T) {
  return MlpTo(pool, kind, x, gate_up, down, y, T);
}

}  // namespace jpaged::amx
