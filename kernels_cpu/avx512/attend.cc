// Paged attention over a pool of bf16 with AVX-512 bf16.
#include "bf16_tiles.h"
#include "level.h"

namespace jpaged::avx512 {

void Attend(const Problem& p, const Item& item, const Item* after) {
  if (p.decode) {
    AttendBy<SlotTiles>(p, item, after);
  } else {
    AttendBy<PackedTiles>(p, item, after);
  }
}

}  // namespace jpaged::avx512
