// The tile registers of AMX, as every kernel of this level has them.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jpaged::amx {

constexpr int64_t kSide = 16;   // rows of a tile, and columns of f32
constexpr int64_t kDepth = 32;  // bf16 in a tile's row, and in a cache line

// What every tile of this thread is while in scope: 16 rows of 64 bytes.
struct Tiles {
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = kSide;
    _tile_loadconfig(&config);
  }
  ~Tiles() { _tile_release(); }
};

}  // namespace jpaged::amx
