// Paged attention with NEON, over pools in 8 bits: in integers where keys and values are int8, else in f32.
#include "../f32_tiles.h"
#include "../int8_tiles.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::neon {

void AttendInt8(const Problem& p, const Item& item, const Item* after) {
  if (p.latent) {
    AttendBy<F32Tiles<Lanes, int8_t>>(p, item, after);
  } else {
    AttendBy<Int8Tiles<Lanes>>(p, item, after);
  }
}
void AttendE4m3(const Problem& p, const Item& item, const Item* after) { AttendBy<F32Tiles<Lanes, E4m3>>(p, item, after); }

}  // namespace jpaged::neon
