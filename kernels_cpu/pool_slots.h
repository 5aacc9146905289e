// What all tiles over a pool share: the scales of a tile's slots, and bringing what comes next into the cache.
#pragma once

#include "attend.h"

namespace jpaged {

// Writes where the scales of slots lie; null for slots that are not seen.
template <typename Slot>
void LocateScales(const Problem& p, const Slot* const (&slots)[kTile], const Slot* zeros, const float* (&scales)[kTile]) {
  int64_t stride = p.Stride(), apart = 2 * stride / p.Width();  // of slots that lie one after the other: numbers, and scales
  const Slot* pool = static_cast<const Slot*>(p.pool);
  for (int64_t slot = 0; slot < kTile; ++slot) {
    bool follows = slot > 0 && scales[slot - 1] != nullptr && slots[slot] == slots[slot - 1] + stride;
    scales[slot] = slots[slot] == zeros ? nullptr
                   : follows            ? scales[slot - 1] + apart
                                        : p.scales + 2 * ((slots[slot] - pool) / p.Width());
  }
}

// Writes the scales of a tile's slots times `unit`, those of keys and of values of each head in turn, [2 heads][kTile]; 0 where
// the slot is not seen.
template <typename L, typename Slot>
void ScalesOf(const Problem& p, int64_t heads, const Tile<Slot>& tile, float unit, float* to) {
  static_assert(L::kCount == 8);
  constexpr float kZeros[L::kCount] = {};
  const float* from[kTile];
  LocateScales(p, tile.keys, tile.zeros, from);
  for (int64_t slot = 0; slot < kTile; slot += L::kCount) {
    int64_t i = 0;
    for (; i + L::kCount <= 2 * heads; i += L::kCount) {
      const float* rows[L::kCount];
      for (int64_t j = 0; j < L::kCount; ++j) rows[j] = from[slot + j] == nullptr ? kZeros : from[slot + j] + i;
      typename L::Floats turned[L::kCount];
      L::Turn(rows, turned);
      for (int64_t j = 0; j < L::kCount; ++j) L::Store(to + (i + j) * kTile + slot, L::Mul(turned[j], L::Set(unit)));
    }
    for (; i < 2 * heads; ++i) {
      for (int64_t j = slot; j < slot + L::kCount; ++j) to[i * kTile + j] = from[j] == nullptr ? 0.0f : from[j][i] * unit;
    }
  }
}

// Brings so many bytes into the cache.
template <int64_t bytes>
inline void FetchBytes(const char* from) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < bytes; i += kCacheLine) PrefetchL2(from + i);
}

// Brings the next tile into the cache, all heads of it, line by line between the products of this one, as much as these read: a
// processor drops what it is asked for beyond the lines that it waits for already.
template <typename Slot>
class TileAhead {
 public:
  void Begin(const Problem& p, const Item& item, const Tile<Slot>& tile) {
    slots_ = tile.next, zeros_ = tile.zeros, size_ = item.heads * p.Width(), slot_ = 0;
    NextRun();
  }
  // Returns where to fetch so many bytes. What lies there behind the end of a run of slots is fetched for nothing.
  const char* Take(int64_t bytes) {
    const char* at = at_;
    if ((at_ += bytes) >= end_) NextRun();
    return at;
  }
  void FetchRest() {
    while (at_ != end_) PrefetchL2(Take(kCacheLine));
  }

 private:
  // Goes on with the next slots that lie one after the other, if there are any.
  void NextRun() {
    while (slot_ < kTile && slots_[slot_] == zeros_) ++slot_;
    if (slot_ == kTile) {
      at_ = end_ = reinterpret_cast<const char*>(zeros_);
      return;
    }
    int64_t first = slot_++;
    while (slot_ < kTile && slots_[slot_] == slots_[slot_ - 1] + size_) ++slot_;
    at_ = reinterpret_cast<const char*>(slots_[first]), end_ = at_ + (slot_ - first) * size_ * sizeof(Slot);
  }

  const Slot* const* slots_;
  const Slot* zeros_;
  const char *at_, *end_;
  int64_t size_, slot_;
};

// Brings the scales of the next tile into the cache, some slots at a time.
template <typename Slot>
class ScalesAhead {
 public:
  void Begin(const Problem& p, int64_t heads, const Tile<Slot>& tile) {
    LocateScales(p, tile.next, tile.zeros, scales_);
    bytes_ = 2 * heads * sizeof(float);
  }
  void Fetch(int64_t slot, int64_t end) const {
    for (; slot < end; ++slot) {
      const char* from = reinterpret_cast<const char*>(scales_[slot]);
      for (int64_t i = 0; i < bytes_; i += kCacheLine) PrefetchL2(from + i);
    }
  }

 private:
  const float* scales_[kTile];
  int64_t bytes_;
};

// What is needed after a head of a tile: the next head of the same slots, or the next tile.
template <typename Slot>
class HeadAhead {
 public:
  HeadAhead(const Problem& p, const Item& item, const Tile<Slot>& tile, int64_t head) : size_(p.Width()) {
    bool is_last = head + 1 == item.heads;
    slots_ = is_last ? tile.next : tile.keys, offset_ = is_last ? 0 : (head + 1) * p.Apart();
  }
  // Brings the lines of a slot into the cache.
  void Fetch(int64_t slot) const {
    for (int64_t i = 0; i < size_; i += kCacheLine / sizeof(Slot)) PrefetchL2(slots_[slot] + offset_ + i);
  }

 private:
  const Slot* const* slots_;
  int64_t size_, offset_;
};

}  // namespace jpaged
