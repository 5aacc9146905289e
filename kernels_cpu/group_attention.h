// Attention of all patches of an image to all others, in f32: flash attention (arXiv:2205.14135) by tiles of 128 keys. A query
// sees the keys whose numbers are its own in all of `groups`; those whose first number is below 0 are padding, are seen by none
// and give zeros. Tiles of keys that no query of a block sees are not computed.
//
// Shapes: q and o [N, H, D], k [N, K, D], v [N, K, V], o [N, H, V], groups [G, N]. Query head h reads head h / (H / K).
#pragma once

#include "kernels.h"

namespace jpaged {

struct GroupProblem {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  void* o = nullptr;
  bool in_bf16 = false;  // all four; otherwise f32
  const int32_t* groups = nullptr;
  float* packed = nullptr;  // K * PackedKeys(N) * (D + PackedWidth(V)) floats
  int64_t N = 0, H = 0, K = 0, D = 0, V = 0, G = 0;
  float scale = 1;
};

constexpr int64_t kKeys = 128;  // of a tile

inline int64_t PackedKeys(int64_t N) { return (N + kKeys - 1) / kKeys * kKeys; }
inline int64_t PackedWidth(int64_t V) { return (V + 31) / 32 * 32; }

// Each level of processors defines it in its level.cc.
void AttendGroups(ffi::ThreadPool& pool, const GroupProblem& p);

}  // namespace jpaged
