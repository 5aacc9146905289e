// Paged attention with AVX2 and FMA in f32, over a pool of bf16.
#include "../f32_tiles.h"
#include "lanes.h"
#include "level.h"

namespace jpaged::avx2 {

void Attend(const Problem& p, const Item& item, const Item* after) { AttendBy<F32Tiles<Lanes, bf16>>(p, item, after); }

}  // namespace jpaged::avx2
