// Paged attention with AVX2 and FMA; see paged_attention.h. A tile's keys and values become f32 once for all queries of an
// item. One order of sums for prefill and decode: the same query over the same context has the same bits in both.
#pragma once

#include "../paged_attention.h"

#include <cmath>
#include <vector>

#include "lanes.h"

namespace jpaged {
namespace {

// One thread's memory, in f32 but for the slot of zeros, in bytes of the pool: an item's queries, accumulators and softmax state, a tile's keys
// and values of one head. Head dimensions lie as lanes.h splits them: of each 16 the even ones, then the odd ones.
struct Scratch {
  std::vector<float> q, k, v, scores, alpha, o, top, total;
  std::vector<uint8_t> zeros;

  void Size(int64_t rows, int64_t D, int64_t slot_bytes) {
    o.assign(rows * D, 0.0f), top.assign(rows, kMasked), total.assign(rows, 0.0f), alpha.resize(rows);
    q.resize(rows * D), k.resize(kTile * D), v.resize(kTile * D), scores.resize(rows * kTile);
    zeros.resize(slot_bytes);
  }
};

inline void Widen(const bf16* from, int64_t D, float* to) {
  for (int64_t d = 0; d < D; d += 2 * kLanes) {
    __m256i words = Words(from + d);
    _mm256_storeu_ps(to + d, Even(words));
    _mm256_storeu_ps(to + d + kLanes, Odd(words));
  }
}

// 16 bytes as words of 32 bits hold those in even places, then those in odd ones.
inline void Widen(const int8_t* from, int64_t D, float scale, float* to) {
  __m256 s = _mm256_set1_ps(scale);
  for (int64_t d = 0; d < D; d += 2 * kLanes) {
    __m256i pairs = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + d)));
    __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(pairs, 24), 24);
    __m256i odd = _mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 24);
    _mm256_storeu_ps(to + d, _mm256_mul_ps(_mm256_cvtepi32_ps(even), s));
    _mm256_storeu_ps(to + d + kLanes, _mm256_mul_ps(_mm256_cvtepi32_ps(odd), s));
  }
}

// Of e4m3 in the low 8 bits of each word: what is not finite has a scale that is not.
inline __m256 FromFp8(__m256i bits) {
  __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x80)), 24);
  __m256i rest = _mm256_and_si256(bits, _mm256_set1_epi32(0x7f));
  __m256i normal = _mm256_add_epi32(_mm256_slli_epi32(rest, 20), _mm256_set1_epi32(120 << 23));
  __m256i small = _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(rest), _mm256_set1_ps(0x1p-9f)));
  __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), rest);
  return _mm256_castsi256_ps(_mm256_or_si256(sign, _mm256_blendv_epi8(normal, small, is_small)));
}

inline void Widen(const Fp8* from, int64_t D, float scale, float* to) {
  __m256 s = _mm256_set1_ps(scale);
  for (int64_t d = 0; d < D; d += 2 * kLanes) {
    __m256i pairs = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(from + d)));
    _mm256_storeu_ps(to + d, _mm256_mul_ps(FromFp8(pairs), s));
    _mm256_storeu_ps(to + d + kLanes, _mm256_mul_ps(FromFp8(_mm256_srli_epi32(pairs, 8)), s));
  }
}

// e^x to 2 units in the last place; 0 below -87, NaN of NaN.
inline __m256 Exp(__m256 x) {
  __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 y = _mm256_set1_ps(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(c));
  }
  y = _mm256_fmadd_ps(y, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  __m256 is_large = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_NLT_UQ);
  return _mm256_and_ps(is_large, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}

// scores[r][s] = q[r] . k[s] of R query rows and the first `slots` slots of a tile, C at a time.
template <int R, int C>
inline void Score(const float* q, const float* k, int64_t D, int64_t slots, float* scores) {
  for (int64_t slot = 0; slot < slots; slot += C, k += C * D) {
    __m256 acc[R][C];
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) acc[r][c] = _mm256_setzero_ps();
    }
    for (int64_t d = 0; d < D; d += kLanes) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        __m256 key = _mm256_loadu_ps(k + c * D + d);
#pragma GCC unroll 3
        for (int r = 0; r < R; ++r) acc[r][c] = _mm256_fmadd_ps(_mm256_loadu_ps(q + r * D + d), key, acc[r][c]);
      }
    }
#pragma GCC unroll 3
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < C; c += 4) {
        _mm_storeu_ps(scores + r * kTile + slot + c, Sums(acc[r][c], acc[r][c + 1], acc[r][c + 2], acc[r][c + 3]));
      }
    }
  }
}

// Scores of a query row against a tile -> weights in their place, and the row's running maximum and sum; returns the factor
// for what it has accumulated. The query sees slots [low, high) of the tile.
float Soften(const Problem& p, float* scores, int64_t low, int64_t high, float* top, float* total) {
  if (p.soft_cap > 0) {
    for (int64_t i = 0; i < kTile; ++i) scores[i] = p.soft_cap * std::tanh(scores[i] * p.scale / p.soft_cap) / p.scale;
  }
  __m256i from = _mm256_set1_epi32(std::clamp<int64_t>(low, 0, kTile) - 1);
  __m256i upto = _mm256_set1_epi32(std::clamp<int64_t>(high, 0, kTile));
  __m256 s[8], seen[8], most = _mm256_set1_ps(kMasked);
  __m256i slot = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int i = 0; i < 8; ++i, slot = _mm256_add_epi32(slot, _mm256_set1_epi32(kLanes))) {
    seen[i] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(slot, from), _mm256_cmpgt_epi32(upto, slot)));
    __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(scores + kLanes * i), _mm256_set1_ps(p.scale));
    s[i] = _mm256_blendv_ps(_mm256_set1_ps(kMasked), scaled, seen[i]);
    most = _mm256_max_ps(most, s[i]);
  }
  float lanes[kLanes], before = *top;
  _mm256_storeu_ps(lanes, most);
  *top = std::max(before, *std::max_element(lanes, lanes + kLanes));
  __m256 sum = _mm256_setzero_ps();
  for (int i = 0; i < 8; ++i) {
    __m256 weight = _mm256_and_ps(seen[i], Exp(_mm256_sub_ps(s[i], _mm256_set1_ps(*top))));
    _mm256_storeu_ps(scores + kLanes * i, weight);
    sum = _mm256_add_ps(sum, weight);
  }
  float alpha = before == *top ? 1.0f : std::exp(before - *top);
  *total = *total * alpha + _mm_cvtss_f32(Sums(sum, sum, sum, sum));
  return alpha;
}

// o[R][8 V] = alpha * o + weights . v over the first `slots` slots of a tile.
template <int R, int V>
inline void Weigh(const float* weights, const float* v, int64_t D, int64_t slots, float* o, const float* alpha) {
  __m256 acc[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) {
      acc[r][i] = _mm256_mul_ps(_mm256_loadu_ps(o + r * D + kLanes * i), _mm256_set1_ps(alpha[r]));
    }
  }
  for (int64_t slot = 0; slot < slots; ++slot, v += D) {
    __m256 values[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) values[i] = _mm256_loadu_ps(v + kLanes * i);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      __m256 weight = _mm256_broadcast_ss(weights + r * kTile + slot);
#pragma GCC unroll 4
      for (int i = 0; i < V; ++i) acc[r][i] = _mm256_fmadd_ps(weight, values[i], acc[r][i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < V; ++i) _mm256_storeu_ps(o + r * D + kLanes * i, acc[r][i]);
  }
}

// Keys and values of a head as f32, slot by slot; `next`, where it is not null, has the slots that come after: their lines
// come into the cache meanwhile.
// `scales`: of the keys at `at`, those of their values after them, or null where the pool has none.
template <typename T>
void WidenTile(const T* const (&at)[kTile], const float* const (&scales)[kTile], int64_t head, int64_t D, int64_t slots,
               Scratch& scratch, const T* const (&next)[kTile], int64_t next_offset) {
  int64_t offset = 2 * head * D;
  for (int64_t slot = 0; slot < slots; ++slot) {
    for (int64_t i = 0; i < 2 * D; i += 64 / sizeof(T)) {
      _mm_prefetch((const char*)(next[slot] + next_offset + i), _MM_HINT_T1);
    }
    if constexpr (sizeof(T) == 1) {
      const float *of_slot = scales[slot], zero[2] = {0.0f, 0.0f}, *pair = of_slot == nullptr ? zero : of_slot + 2 * head;
      Widen(at[slot] + offset, D, pair[0], &scratch.k[slot * D]);
      Widen(at[slot] + offset + D, D, pair[1], &scratch.v[slot * D]);
    } else {
      Widen(at[slot] + offset, D, &scratch.k[slot * D]);
      Widen(at[slot] + offset + D, D, &scratch.v[slot * D]);
    }
  }
}

// The scales of a tile's slots; null for those that are not seen.
template <typename T>
void LocateScales(const Problem& p, const T* const (&at)[kTile], const T* zeros, const float* (&scales)[kTile]) {
  for (int64_t slot = 0; slot < kTile; ++slot) {
    scales[slot] = at[slot] == zeros ? nullptr : p.scales + (at[slot] - static_cast<const T*>(p.pool)) / p.D;
  }
}

// One head's query rows [first, first + rows) against the tile in scratch, whose first slot is at position `tile`.
void AttendTile(const Problem& p, const Item& item, int64_t first, int64_t rows, int64_t tile, int64_t slots,
                Scratch& scratch) {
  int64_t D = p.D;
  const float *k = scratch.k.data(), *v = scratch.v.data();
  for (int64_t r = 0, n; r < rows; r += n) {
    n = std::min<int64_t>(3, rows - r);
    auto score = n == 3 ? &Score<3, 4> : n == 2 ? &Score<2, 4> : &Score<1, 8>;
    score(&scratch.q[(first + r) * D], k, D, slots, &scratch.scores[(first + r) * kTile]);
  }
  for (int64_t r = first; r < first + rows; ++r) {
    int64_t position = item.position + (r - first) / p.G, low = p.window > 0 ? position + 1 - p.window - tile : 0;
    scratch.alpha[r] = Soften(p, &scratch.scores[r * kTile], low, position + 1 - tile, &scratch.top[r], &scratch.total[r]);
  }
  using Function = decltype(&Weigh<1, 4>);
  static constexpr Function kBySize[] = {&Weigh<1, 4>, &Weigh<2, 4>, &Weigh<3, 2>, &Weigh<4, 2>, &Weigh<5, 2>, &Weigh<6, 2>};
  for (int64_t r = first, n; r < first + rows; r += n) {
    n = std::min<int64_t>(6, first + rows - r);
    for (int64_t d = 0, width = n <= 2 ? 4 * kLanes : 2 * kLanes; d < D; d += width) {
      kBySize[n - 1](&scratch.scores[r * kTile], v + d, D, slots, &scratch.o[r * D + d], &scratch.alpha[r]);
    }
  }
}

// Attend over a pool of T.
template <typename T>
void AttendAs(const Problem& p, const Item& item, const Item* after) {
  static thread_local Scratch scratch;
  int64_t rows = item.count * p.G, D = p.D;  // query rows of a head: [count, G]
  scratch.Size(item.heads * rows, D, 2 * item.heads * D * sizeof(T));
  auto place = [&](int64_t row) {  // of a query row in q and o
    int64_t head = item.head + row / rows, token = item.token + row % rows / p.G;
    return (token * p.H + head * p.G + row % p.G) * D;
  };
  for (int64_t row = 0; row < item.heads * rows; ++row) {
    Widen(p.q + place(row), D, &scratch.q[row * D]);
    Start(p, place(row) / D % p.H, &scratch.top[row], &scratch.total[row]);
  }
  const T *at[kTile], *next[kTile], *zeros = reinterpret_cast<const T*>(scratch.zeros.data());
  const float* scales[kTile] = {};
  int64_t first = item.begin / kTile * kTile;
  Locate(p, item, item.head, first, zeros, at);
  for (; first < item.end; first += kTile) {
    if (first + kTile < item.end) {
      Locate(p, item, item.head, first + kTile, zeros, next);
    } else if (after != nullptr) {
      Locate(p, *after, after->head, after->begin / kTile * kTile, zeros, next);
    } else {
      std::fill(next, next + kTile, zeros);
    }
    if constexpr (sizeof(T) == 1) LocateScales(p, at, zeros, scales);
    int64_t slots = std::min(kTile, (item.end - first + 7) / 8 * 8);
    for (int64_t head = 0; head < item.heads; ++head) {
      bool is_last = head + 1 == item.heads;
      WidenTile(at, scales, head, D, slots, scratch, is_last ? next : at, is_last ? 0 : 2 * (head + 1) * D);
      AttendTile(p, item, head * rows, rows, first, slots, scratch);
    }
    std::memcpy(at, next, sizeof(at));
  }
  for (int64_t row = 0; row < item.heads * rows; ++row) {
    __m256 total = _mm256_set1_ps(scratch.total[row]);
    for (int64_t d = 0; d < D; d += 2 * kLanes) {
      const float* o = &scratch.o[row * D + d];
      __m256i even = Rounded(_mm256_div_ps(_mm256_loadu_ps(o), total));
      __m256i odd = Rounded(_mm256_div_ps(_mm256_loadu_ps(o + kLanes), total));
      __m256i words = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
      _mm256_storeu_si256((__m256i*)(p.o + place(row) + d), words);
    }
  }
}
}  // namespace
}  // namespace jpaged
