// The tile registers of AMX, as every kernel of this level has them, and what other instructions need to compute as they do.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>

namespace jpaged::amx {

constexpr int64_t kSide = 16;   // rows of a tile, and columns of f32
constexpr int64_t kDepth = 32;  // bf16 in a tile's row, and in a cache line

// What every tile of this thread is while in scope: 16 rows of 64 bytes. The tiles that hold sums and second operands may have fewer
// columns, of four bytes each; 4 and 5 are first operands. The descriptions are constants: compilers know of the first bytes alone that
// the instruction reads them, and would leave out what writes the others.
struct Tiles {
  struct alignas(64) Description {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {kSide, kSide, kSide, kSide, kSide, kSide, kSide, kSide};

    constexpr explicit Description(int columns) {
      for (int tile = 0; tile < 8; ++tile) bytes[tile] = tile == 4 || tile == 5 ? 64 : 4 * columns;
    }
  };

  // columns: 1 to 16, of all tiles but 4 and 5.
  explicit Tiles(int64_t columns = kSide) {
    using D = Description;
    static constexpr D kDescriptions[] = {D(1), D(2),  D(3),  D(4),  D(5),  D(6),  D(7),  D(8),
                                          D(9), D(10), D(11), D(12), D(13), D(14), D(15), D(16)};
    _tile_loadconfig(&kDescriptions[columns - 1]);
  }
  ~Tiles() { _tile_release(); }
};

// Denormal numbers are zeros in this thread while in scope, as they are to tiles. What is computed then is in functions that are not
// inlined: compilers do not know that arithmetic depends on it.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | kFlush | kAreZeros); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  static constexpr uint32_t kFlush = 0x8000, kAreZeros = 0x40;
  uint32_t before_;
};

// Has what was written before in the order of the program be in memory for tiles that are loaded after: compilers do not know that
// loading a tile reads memory.
inline void WriteBeforeTiles() { std::atomic_signal_fence(std::memory_order_seq_cst); }

}  // namespace jpaged::amx
