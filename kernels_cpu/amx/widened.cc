// Products with weights in 8 and 4 bits as bf16 (Activations::kPlain) by AMX's tiles; see bf16_weights.h for what they become.
//
// A group of 32 rows of the weight becomes bf16 128 inputs at a time, in the order in which tiles are read, while the tiles are at
// work on the 128 before: in the L1 cache where up to 48 rows of x meet them, else kept for those that come after.
#include "../bf16_weights.h"
#include "bf16_products.h"
#include "level.h"

namespace jpaged::amx {
namespace {

using avx512::Widener;

constexpr int64_t kChunk = 4 * kDepth;             // inputs that become bf16 together
constexpr int64_t kChunkSize = kGroup * kChunk;    // numbers in them
constexpr int64_t kTileSize = kSide * kDepth;

// The chunks of the groups [begin, end) of a weight as bf16, one after the other: a few of them at a time.
template <Form form, Scales kind>
class Chunks {
 public:
  // kept: how many there are at a time.
  Chunks(const Quantized& w, int64_t begin, int64_t end, int64_t kept)
      : w_(w), begin_(begin), of_group_((w.E + kChunk - 1) / kChunk), count_((end - begin) * of_group_), kept_(kept),
        blocks_of_scale_(w.Group() / kDepth) {
    static thread_local Memory memory;
    values_ = Scratch<bf16>(memory, kept * kChunkSize);
  }

  // Where the inputs from e on of 16 rows lie, of the group whose first chunk is `chunk`: 16 rows of 32.
  const bf16* Tile(int64_t chunk, int64_t half, int64_t e) const {
    return Place(chunk + e / kChunk) + (e % kChunk / kDepth * 2 + half) * kTileSize;
  }

  // Makes part `part` of `parts` of a chunk, if there is such a chunk.
  void Widen(int64_t chunk, int64_t part, int64_t parts) {
    if (chunk >= count_) return;
    int64_t first = chunk % of_group_ * kChunk, n = (begin_ + chunk / of_group_) * kGroup;
    int64_t begin = kGroup * part / parts, end = kGroup * (part + 1) / parts;
    if (first + kChunk <= w_.E) {
      WidenRows<kBlocks>(n, begin, end, first, kBlocks, Place(chunk));
    } else {
      WidenRows<0>(n, begin, end, first, (w_.E - first) / kDepth, Place(chunk));
    }
  }

 private:
  static constexpr int64_t kBlocks = kChunk / kDepth;
  static constexpr bool kIsExact = kind == Scales::kRow;

  bf16* Place(int64_t chunk) const { return values_ + chunk % kept_ * kChunkSize; }

  // The blocks of 32 inputs from `first` on of rows [begin, end) of the group whose first row is n. What lies as far on in the next
  // group comes towards the cache. kCount: how many blocks, if it is known.
  template <int64_t kCount>
  void WidenRows(int64_t n, int64_t begin, int64_t end, int64_t first, int64_t count, bf16* to) const {
    if (kCount != 0) count = kCount;
    int64_t scale_of[kBlocks], block = first / kDepth;
    if (!kIsExact) {
      for (int64_t b = 0; b < count; ++b) scale_of[b] = (block + b) / blocks_of_scale_;
    }
    const int64_t row_bytes = w_.RowBytes();
    for (int64_t row = begin; row < end; ++row) {
      int64_t from_row = std::min(n + row, w_.N - 1);
      const uint8_t* from = static_cast<const uint8_t*>(w_.values) + from_row * row_bytes + Bytes(form, first);
      bf16* tile = to + row / kSide * kTileSize + row % kSide * kDepth;
      for (int64_t byte = 0; byte < Bytes(form, kChunk); byte += kCacheLine) PrefetchL2(from + kGroup * row_bytes + byte);
      const float *scales = w_.scales + from_row * w_.S, *zeros = kind == Scales::kZeros ? w_.zeros + from_row * w_.S : nullptr;
      if (!kIsExact) PrefetchL2(scales + kGroup * w_.S + scale_of[0]);
      for (int64_t b = 0; b < count; ++b) {
        const uint8_t* values = from + Bytes(form, b * kDepth);
        WidenBlock(values, kIsExact ? 1.0f : scales[scale_of[b]], kind == Scales::kZeros ? zeros[scale_of[b]] : 0.0f, tile + b * 2 * kTileSize);
      }
    }
  }

  // 32 inputs of a row.
  static void WidenBlock(const uint8_t* from, float scale, float zero, bf16* to) {
    if constexpr (form == Form::kInt4) {
      Widener::Int4(scale, zero).Put(from, to);
    } else {
      using Byte = std::conditional_t<form == Form::kInt8, int8_t, E4m3>;
      if constexpr (kIsExact) {
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

// A group of which MultiplyTiles reads tiles.
template <typename Chunks>
struct WidenedGroup {
  const Chunks& chunks;
  int64_t first;  // chunk
  int64_t stride = kDepth * sizeof(bf16);

  const bf16* Tile(int64_t half, int64_t e) const { return chunks.Tile(first, half, e); }
};

// Writes the sums of 16 rows of x, `rows` of which are real, and of the 32 outputs from n on.
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
  int64_t tiles = last - first, steps = (tiles + kTogether - 1) / kTogether, of_group = (w.E + kChunk - 1) / kChunk;
  Chunks chunks(w, begin, end, steps == 1 ? 2 : of_group + 1);
  chunks.Widen(0, 0, 1);
  alignas(kCacheLine) Sums sums[kTogether];
  for (int64_t group = begin; group < end; ++group) {
    WidenedGroup<Chunks> weights{chunks, (group - begin) * of_group};
    for (int64_t step = 0; step < steps; ++step) {
      int64_t tile = first + tiles * step / steps, count = first + tiles * (step + 1) / steps - tile, e = 0;
      auto aside = [&] {  // the first rows of x have the next chunks made, the last ones the next group's first
        int64_t chunk = e / kChunk, part = e % kChunk / kDepth, parts = std::min(kChunk, w.E - chunk * kChunk) / kDepth;
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
