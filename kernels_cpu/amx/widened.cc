// Products with weights in 8 and 4 bits as bf16 (Activations::kPlain) by AMX's tiles.
//
// A group of 32 rows of the weight becomes bf16 in chunks of 128 inputs, in the order in which tiles are read, a few rows before
// each 32 inputs that the tiles multiply. Where up to 48 rows of x meet the weight, two chunks take turns in the L1 cache: one
// that is multiplied, and the next one. For more rows of x a group is kept.
#include "../bf16_weights.h"
#include "bf16_products.h"
#include "level.h"

namespace jpaged::amx {
namespace {

using avx512::Widener;

constexpr int64_t kBlocks = 4;                   // of 32 inputs in a chunk
constexpr int64_t kChunk = kBlocks * kDepth;     // its inputs
constexpr int64_t kChunkSize = kGroup * kChunk;  // its numbers
constexpr int64_t kTileSize = kSide * kDepth;

inline int64_t ChunksOf(int64_t E) { return (E + kChunk - 1) / kChunk; }

// The groups [begin, end) of a weight as bf16, chunk after chunk, of which the last `kept` are there.
template <Form form, Scales kind>
class Chunks {
 public:
  Chunks(const Quantized& w, int64_t begin, int64_t end, int64_t kept)
      : w_(w), begin_(begin), of_group_(ChunksOf(w.E)), count_((end - begin) * of_group_), kept_(kept), blocks_of_scale_(w.Group() / kDepth) {
    static thread_local Memory memory;
    values_ = Scratch<bf16>(memory, kept * kChunkSize);
  }

  // Returns where the inputs from e on of 16 rows lie, [16 rows][32], of the group whose first chunk is `chunk`.
  const bf16* Tile(int64_t chunk, int64_t half, int64_t e) const {
    return Place(chunk + e / kChunk) + (e % kChunk / kDepth * 2 + half) * kTileSize;
  }

  // Makes part `part` of `parts` of a chunk, if there is such a chunk.
  void Widen(int64_t chunk, int64_t part, int64_t parts) {
    if (chunk >= count_) return;
    int64_t first = chunk % of_group_ * kChunk, n = (begin_ + chunk / of_group_) * kGroup;
    int64_t row = kGroup * part / parts, end = kGroup * (part + 1) / parts;
    if (first + kChunk <= w_.E) {
      WidenRows(n, row, end, first, std::integral_constant<int64_t, kBlocks>(), Place(chunk));
    } else {
      WidenRows(n, row, end, first, (w_.E - first) / kDepth, Place(chunk));
    }
  }

 private:
  bf16* Place(int64_t chunk) const { return values_ + chunk % kept_ * kChunkSize; }

  // Makes `count` blocks from input `first` on of rows [row, end) of the group that begins with row n. What lies as far on in the
  // next group comes towards the cache.
  template <typename Count>
  void WidenRows(int64_t n, int64_t row, int64_t end, int64_t first, Count count, bf16* to) const {
    int64_t scale_of[kBlocks] = {}, bytes = w_.RowBytes();
    if (kind != Scales::kRow) {
      for (int64_t b = 0; b < count; ++b) scale_of[b] = (first / kDepth + b) / blocks_of_scale_;
    }
    for (; row < end; ++row) {
      int64_t from_row = std::min(n + row, w_.N - 1);  // a tile has all of its rows
      const uint8_t* from = static_cast<const uint8_t*>(w_.values) + from_row * bytes + Bytes(form, first);
      const float *scales = w_.scales + from_row * w_.S, *zeros = kind == Scales::kZeros ? w_.zeros + from_row * w_.S : nullptr;
      for (int64_t byte = 0; byte < Bytes(form, kChunk); byte += kCacheLine) PrefetchL2(from + kGroup * bytes + byte);
      if (kind != Scales::kRow) PrefetchL2(scales + kGroup * w_.S + scale_of[0]);
      bf16* tile = to + row / kSide * kTileSize + row % kSide * kDepth;
      for (int64_t b = 0; b < count; ++b) {
        float scale = kind == Scales::kRow ? 1.0f : scales[scale_of[b]], zero = kind == Scales::kZeros ? zeros[scale_of[b]] : 0.0f;
        WidenBlock(from + Bytes(form, b * kDepth), scale, zero, tile + b * 2 * kTileSize);
      }
    }
  }

  // Makes 32 inputs of a row.
  static void WidenBlock(const uint8_t* from, float scale, float zero, bf16* to) {
    if constexpr (form == Form::kInt4) {
      Widener::Int4(scale, zero).Put(from, to);
    } else {
      using Byte = std::conditional_t<form == Form::kInt8, int8_t, E4m3>;
      if constexpr (kind == Scales::kRow) {
        Widener::Exact(reinterpret_cast<const Byte*>(from), to);
      } else {
        Widener::Scaled(reinterpret_cast<const Byte*>(from), scale, to);
      }
    }
  }

  const Quantized& w_;
  int64_t begin_, of_group_, count_, kept_, blocks_of_scale_;
  bf16* values_;
};

// A group as MultiplyTiles takes it.
template <typename Chunks>
struct WidenedGroup {
  const Chunks& chunks;
  int64_t first;                           // its first chunk
  int64_t stride = kDepth * sizeof(bf16);  // bytes from row to row

  const bf16* Tile(int64_t half, int64_t e) const { return chunks.Tile(first, half, e); }
};

// Writes the sums of up to 16 rows of x and of the 32 outputs from n on.
void Write(const Quantized& w, const Sums& sums, int64_t n, int64_t rows, float* y) {
  for (int64_t half = 0; half < 2; ++half) {
    int64_t first = n + half * kSide, count = std::min(kSide, w.N - first);
    if (count <= 0) return;
    __m512i words[kSide];
    for (int64_t i = 0; i < kSide; ++i) {
      __m512 sum = _mm512_load_ps(sums[half][i]);
      if (w.Kind() == Scales::kRow) sum = _mm512_mul_ps(sum, _mm512_set1_ps(w.scales[std::min(first + i, w.N - 1)]));
      words[i] = _mm512_castps_si512(sum);
    }
    avx512::Transpose(words, [&](int64_t i, __m512i row) {
      if (i < rows) _mm512_mask_storeu_epi32(y + i * w.N + first, (1u << count) - 1, row);
    });
  }
}

// The products of the tiles [first, last) of packed x and the groups [begin, end) of w.
template <typename Chunks>
void MultiplyGroups(const bf16* x, int64_t T, const Quantized& w, float* y, int64_t first, int64_t last, int64_t begin, int64_t end) {
  int64_t tiles = last - first, steps = (tiles + kTogether - 1) / kTogether, of_group = ChunksOf(w.E);
  Chunks chunks(w, begin, end, steps == 1 ? 2 : of_group + 1);
  chunks.Widen(0, 0, 1);
  alignas(kCacheLine) Sums sums[kTogether];
  for (int64_t group = begin; group < end; ++group) {
    WidenedGroup<Chunks> weights{chunks, (group - begin) * of_group};
    for (int64_t step = 0; step < steps; ++step) {
      int64_t tile = first + tiles * step / steps, count = first + tiles * (step + 1) / steps - tile, e = 0;
      auto aside = [&] {
        int64_t chunk = e / kChunk, part = e % kChunk / kDepth, parts = std::min(kChunk, w.E - chunk * kChunk) / kDepth;
        // The next chunk of this group is made for the first rows of x; the next group's first one replaces what the last rows do
        // not need any more.
        if (step == (chunk + 1 < of_group ? 0 : steps - 1)) chunks.Widen(weights.first + chunk + 1, part, parts);
        e += kDepth;
      };
      const bf16* from = x + tile * kSide * w.E;
      if (count == 3) {
        MultiplyTiles<3>(from, weights, w.E, aside, sums);
      } else if (count == 2) {
        MultiplyTiles<2>(from, weights, w.E, aside, sums);
      } else {
        MultiplyTiles<1>(from, weights, w.E, aside, sums);
      }
      for (int64_t i = 0; i < count; ++i) {
        int64_t t = (tile + i) * kSide;
        Write(w, sums[i], group * kGroup, std::min(kSide, T - t), y + t * w.N);
      }
    }
  }
}
}  // namespace

void MultiplyPlain(ffi::ThreadPool& pool, const bf16* x, const Quantized& w, float* y, int64_t T) {
  if (T == 0) return;
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, Packed(T, w.E));
  ParallelFor(pool, TilesOf(T), [&](int64_t i) { PackRows([&](int64_t t) { return x + t * w.E; }, T, w.E, i, packed); });
  auto multiply = &MultiplyGroups<Chunks<Form::kInt4, Scales::kGroups>>;
  if (w.Kind() == Scales::kZeros) multiply = &MultiplyGroups<Chunks<Form::kInt4, Scales::kZeros>>;
  if (w.form == Form::kInt8) multiply = &MultiplyGroups<Chunks<Form::kInt8, Scales::kGroups>>;
  if (w.form == Form::kE4m3) multiply = &MultiplyGroups<Chunks<Form::kE4m3, Scales::kGroups>>;
  if (w.Kind() == Scales::kRow) {
    multiply = w.form == Form::kInt8 ? &MultiplyGroups<Chunks<Form::kInt8, Scales::kRow>> : &MultiplyGroups<Chunks<Form::kE4m3, Scales::kRow>>;
  }
  ForBlocks(pool, T, w.E, (w.N + kGroup - 1) / kGroup, [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
    multiply(packed, T, w, y, first, last, begin, end);
  });
}

}  // namespace jpaged::amx
