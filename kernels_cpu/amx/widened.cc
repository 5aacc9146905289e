// Products with weights in 8 and 4 bits as bf16 (Activations::kPlain) by AMX's tiles.
//
// A group of 32 rows of the weight becomes bf16 in chunks of 128 inputs, in the order in which tiles are read, each while the chunk
// before it is multiplied: a few rows before each 32 inputs that the tiles multiply, or all at once. Where up to 48 rows of x meet
// the weight, two chunks take turns in the L1 cache. For more rows of x a group is kept.
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
    int64_t row = kGroup * part / parts, end = std::min(kGroup * (part + 1) / parts, w_.N - n);
    if (first + kChunk <= w_.E) {
      WidenRows(n, row, end, first, std::integral_constant<int64_t, kBlocks>(), Place(chunk));
    } else {
      WidenRows(n, row, end, first, (w_.E - first) / kDepth, Place(chunk));
    }
  }

 private:
  bf16* Place(int64_t chunk) const { return values_ + chunk % kept_ * kChunkSize; }

  // Makes `count` blocks from input `first` on of rows [row, end) of the group that begins with row n. What lies as far on in the
  // next group comes towards the cache. Rows past the last one have no output: whatever their places in a tile hold will do.
  template <typename Count>
  void WidenRows(int64_t n, int64_t row, int64_t end, int64_t first, Count count, bf16* to) const {
    int64_t scale_of[kBlocks] = {}, bytes = w_.RowBytes(), S = w_.S;
    if (kind != Scales::kRow) {
      for (int64_t b = 0; b < count; ++b) scale_of[b] = (first / kDepth + b) / blocks_of_scale_;
    }
    // A row's addresses come from those of the row before: a compiler cannot know that w_ stays as it is while tiles are written.
    const uint8_t* from = w_.Row(n + row) + Bytes(form, first);
    const float *scales = w_.scales + (n + row) * S, *zeros = kind == Scales::kZeros ? w_.zeros + (n + row) * S : nullptr;
    for (to += row * kDepth; row < end; ++row, to += kDepth, from += bytes, scales += S) {
      for (int64_t byte = 0; byte < Bytes(form, kChunk); byte += kCacheLine) PrefetchL2(from + kGroup * bytes + byte);
      if (kind != Scales::kRow) PrefetchL2(scales + kGroup * S + scale_of[0]);
      for (int64_t b = 0; b < count; b += 2) {
        bf16* tile = to + b * 2 * kTileSize;
        if constexpr (form == Form::kInt4) {
          WidenPair(from + Bytes(form, b * kDepth), scales, zeros, scale_of + b, b + 1 < count, tile);
        } else {
          WidenBlock(from + b * kDepth, scales[scale_of[b]], tile);
          if (b + 1 < count) WidenBlock(from + (b + 1) * kDepth, scales[scale_of[b + 1]], tile + 2 * kTileSize);
        }
      }
      if (kind == Scales::kZeros) zeros += S;
    }
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
    const __m512i number = _mm512_set1_epi16(15), half = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    __m512i bytes = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi64(is_pair ? 0xf : 0x3, from));
    __m512i lower = _mm512_ternarylogic_epi32(bytes, number, half, 0xea);  // (bytes & number) | half
    __m512i upper = _mm512_or_si512(_mm512_srli_epi16(bytes, 4), half);
    lower = _mm512_permutexvar_epi16(lower, table), upper = _mm512_permutexvar_epi16(upper, table);
    auto put = [](bf16* block, __m256i first, __m256i second) {
      _mm256_storeu_si256((__m256i*)block, first);
      _mm256_storeu_si256((__m256i*)(block + kDepth / 2), second);
    };
    put(to, _mm512_castsi512_si256(lower), _mm512_castsi512_si256(upper));
    if (is_pair) put(to + 2 * kTileSize, _mm512_extracti64x4_epi64(lower, 1), _mm512_extracti64x4_epi64(upper, 1));
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
        // The next chunk of this group is made for the first rows of x; the next group's first one replaces what the last rows do
        // not need any more.
        int64_t chunk = e / kChunk, part = e % kChunk / kDepth, blocks = std::min(kChunk, w.E - chunk * kChunk) / kDepth;
        // Beside a single tile of x, int4 costs less the fewer turns widening and tiles take. Bytes gain nothing by that.
        int64_t parts = count == 1 && w.form == Form::kInt4 ? 1 : blocks;
        if (part < parts && step == (chunk + 1 < of_group ? 0 : steps - 1)) chunks.Widen(weights.first + chunk + 1, part, parts);
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
