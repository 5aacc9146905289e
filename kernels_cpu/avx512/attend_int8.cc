// Paged attention over a pool of int8 with VNNI, in integers and with the bits of AVX2. Not of latents.
#include "../avx2/lanes.h"
#include "../int8_tiles.h"
#include "level.h"

namespace jpaged::avx512 {
namespace {

// AVX2's registers, whose products are added to a sum by one instruction.
struct VnniLanes : avx2::Lanes {
  static Integers AddPairSums(Integers sum, Words a, Words b) { return _mm256_dpwssd_epi32(sum, a, b); }
};

}  // namespace

void AttendInt8(const Problem& p, const Item& item, const Item* after) { AttendBy<Int8Tiles<VnniLanes>>(p, item, after); }

}  // namespace jpaged::avx512
