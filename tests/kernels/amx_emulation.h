// AMX's tile instructions in plain C++, by the names that compilers give them: a test includes this file before every
// other (-include) to run the kernels of the level `amx` on a processor without tiles.
//
// TDPBF16PS as Intel's manual has it, and as a Xeon was seen to do it: the even inputs of a row's 32 and the odd ones are
// summed apart from zero on, rounded each time to the nearest; both sums are added, and then to what the tile held.
// Denormal numbers are zeros there.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace amx_emulation {

struct Tile {
  uint8_t bytes[16][64];
};

struct State {
  Tile tiles[8] = {};
  int64_t bytes[8] = {};  // of a tile's row
  bool is_configured = false;
};

inline thread_local State state;

inline Tile& At(int tile) {
  if (!state.is_configured) __builtin_trap();  // as the processor does
  return state.tiles[tile];
}

inline void LoadConfig(const void* config) {
  const uint8_t* bytes = static_cast<const uint8_t*>(config);
  bool is_taken = bytes[0] == 1;
  state = State();
  for (int i = 0; i < 8; ++i) {
    state.bytes[i] = bytes[16 + 2 * i];
    is_taken = is_taken && bytes[48 + i] == 16 && 0 < state.bytes[i] && state.bytes[i] <= 64 && state.bytes[i] % 4 == 0;
  }
  if (!is_taken) __builtin_trap();  // the kernels use tiles of 16 rows alone
  state.is_configured = true;
}

inline void Release() { state.is_configured = false; }

inline void Zero(int tile) { std::memset(&At(tile), 0, sizeof(Tile)); }

inline void Load(int tile, const void* base, int64_t stride) {
  Zero(tile);
  for (int row = 0; row < 16; ++row) std::memcpy(At(tile).bytes[row], static_cast<const char*>(base) + row * stride, state.bytes[tile]);
}

inline void Store(int tile, void* base, int64_t stride) {
  for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(base) + row * stride, At(tile).bytes[row], state.bytes[tile]);
}

inline float Widened(uint16_t bits) {
  uint32_t word = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// The shapes of tiles that are multiplied fit, as the processor demands.
inline void CheckShapes(int sums, int left, int right) {
  if (state.bytes[left] != 64 || state.bytes[right] != state.bytes[sums]) __builtin_trap();
}

using Bf16Tile = uint16_t[16][32];
using F32Tile = float[16][16];

// Not inlined: compilers do not know that arithmetic depends on whether denormal numbers are zeros.
[[gnu::noinline]] inline void AddProducts(const Bf16Tile& a, const Bf16Tile& b, F32Tile& c) {
  float of_even[16][16] = {}, of_odd[16][16] = {};
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 16; ++n) {
        of_even[m][n] = std::fma(Widened(a[m][2 * k]), Widened(b[k][2 * n]), of_even[m][n]);
        of_odd[m][n] = std::fma(Widened(a[m][2 * k + 1]), Widened(b[k][2 * n + 1]), of_odd[m][n]);
      }
    }
    for (int n = 0; n < 16; ++n) c[m][n] += of_even[m][n] + of_odd[m][n];
  }
}

inline void MultiplyBf16(int sums, int left, int right) {
  CheckShapes(sums, left, right);
  constexpr unsigned kDenormalsAreZeros = 0x8040;  // as operands and as results
  F32Tile c;
  Bf16Tile a, b;
  std::memcpy(c, &At(sums), sizeof(c)), std::memcpy(a, &At(left), sizeof(a)), std::memcpy(b, &At(right), sizeof(b));
  unsigned before = _mm_getcsr();
  _mm_setcsr(before | kDenormalsAreZeros);
  AddProducts(a, b, c);
  _mm_setcsr(before);
  std::memcpy(&At(sums), c, sizeof(c));
}

// TDPBSSD, TDPBSUD and TDPBUSD: the sums of 64 products of bytes, each with a sign (int8_t) or without one (uint8_t).
template <typename Left, typename Right>
inline void MultiplyBytes(int sums, int left, int right) {
  CheckShapes(sums, left, right);
  uint32_t c[16][16];
  Left a[16][64];
  Right b[16][64];
  std::memcpy(c, &At(sums), sizeof(c)), std::memcpy(a, &At(left), sizeof(a)), std::memcpy(b, &At(right), sizeof(b));
  for (int m = 0; m < 16; ++m) {
    for (int k = 0; k < 64; ++k) {
      for (int n = 0; n < 16; ++n) c[m][n] += a[m][k] * b[k / 4][4 * n + k % 4];
    }
  }
  std::memcpy(&At(sums), c, sizeof(c));
}

}  // namespace amx_emulation

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#define _tile_loadconfig(config) amx_emulation::LoadConfig(config)
#define _tile_release() amx_emulation::Release()
#define _tile_loadd(tile, base, stride) amx_emulation::Load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) amx_emulation::Load(tile, base, stride)
#define _tile_stored(tile, base, stride) amx_emulation::Store(tile, base, stride)
#define _tile_zero(tile) amx_emulation::Zero(tile)
#define _tile_dpbf16ps(sums, left, right) amx_emulation::MultiplyBf16(sums, left, right)
#define _tile_dpbssd(sums, left, right) amx_emulation::MultiplyBytes<int8_t, int8_t>(sums, left, right)
#define _tile_dpbsud(sums, left, right) amx_emulation::MultiplyBytes<int8_t, uint8_t>(sums, left, right)
#define _tile_dpbusd(sums, left, right) amx_emulation::MultiplyBytes<uint8_t, int8_t>(sums, left, right)
