// Paged attention with AVX2 and FMA, in f32, over every kind of pool.
#include "../f32_tiles.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::avx2 {

void Attend(const Problem& p, const Item& item, const Item* after) { AttendBy<F32Tiles<Lanes, bf16>>(p, item, after); }
void AttendInt8(const Problem& p, const Item& item, const Item* after) { AttendBy<F32Tiles<Lanes, int8_t>>(p, item, after); }
void AttendE4m3(const Problem& p, const Item& item, const Item* after) { AttendBy<F32Tiles<Lanes, E4m3>>(p, item, after); }

}  // namespace jpaged::avx2
