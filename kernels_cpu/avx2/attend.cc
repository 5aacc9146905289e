// Attend with AVX2, over a pool of bf16.
#include "attend.h"

namespace jpaged {

void Attend(const Problem& p, const Item& item, const Item* after) { AttendAs<bf16>(p, item, after); }
}  // namespace jpaged
