// Attend over pools in 8 bits with scales, on every processor.
#include "avx2/attend.h"

namespace jpaged {

void AttendInt8(const Problem& p, const Item& item, const Item* after) { AttendAs<int8_t>(p, item, after); }
void AttendFp8(const Problem& p, const Item& item, const Item* after) { AttendAs<Fp8>(p, item, after); }
}  // namespace jpaged
