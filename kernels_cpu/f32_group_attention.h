// Attention within groups on any level; see group_attention.h. Keys are packed in panels, queries of a block too, and both
// products are those of f32_panels.h.
#pragma once

#include "attend.h"
#include "f32_panels.h"
#include "group_attention.h"

namespace jpaged {

template <typename L, typename X>
class F32GroupAttention {
  using P = F32Panels<L>;
  static constexpr int64_t kBlock = 48;  // queries of an item
  static constexpr float kNever = -1e30f, kLowest = -1e29f;  // finite: what is not seen is far below what has seen nothing

 public:
  F32GroupAttention(const GroupProblem& p)
      : p_(p), keys_(PackedKeys(p.N)), width_(PackedWidth(p.V)), count_(Count()), of_keys_(Bounds(kKeys)), of_queries_(Bounds(kBlock)) {}

  void Attend(ffi::ThreadPool& pool) const {
    int64_t tiles = (count_ + kKeys - 1) / kKeys, blocks = (p_.N + kBlock - 1) / kBlock;
    ParallelFor(pool, p_.K * tiles, [&](int64_t item) { PackTile(item / tiles, item % tiles); });
    ParallelFor(pool, p_.H * blocks, [&](int64_t item) { AttendBlock(item / blocks, item % blocks); });
  }

 private:
  // The least and the largest numbers of some patches in each group, padding left out; `is_whole`: none of them is padding.
  struct Bound {
    std::vector<int32_t> least, most;
    bool is_empty = true, is_whole = true;

    bool IsOne() const { return is_whole && least == most; }
    bool Meets(const Bound& other) const {
      for (size_t g = 0; g < least.size(); ++g) {
        if (least[g] > other.most[g] || other.least[g] > most[g]) return false;
      }
      return !is_empty && !other.is_empty;
    }
  };

  const X* Typed(const void* x) const { return static_cast<const X*>(x); }
  int32_t Group(int64_t g, int64_t n) const { return p_.groups[g * p_.N + n]; }
  float* Keys(int64_t head) const { return p_.packed + head * keys_ * (p_.D + width_); }
  float* Values(int64_t head) const { return Keys(head) + keys_ * p_.D; }

  // Patches up to the last that is not padding.
  int64_t Count() const {
    int64_t n = p_.N;
    while (n > 0 && Group(0, n - 1) < 0) --n;
    return n;
  }

  std::vector<Bound> Bounds(int64_t size) const {
    std::vector<Bound> bounds((p_.N + size - 1) / size);
    for (int64_t i = 0; i < static_cast<int64_t>(bounds.size()); ++i) {
      Bound& bound = bounds[i];
      bound.least.assign(p_.G, 0), bound.most.assign(p_.G, 0), bound.is_whole = (i + 1) * size <= p_.N;
      for (int64_t n = i * size; n < std::min(p_.N, (i + 1) * size); ++n) {
        if (Group(0, n) < 0) {
          bound.is_whole = false;
          continue;
        }
        for (int64_t g = 0; g < p_.G; ++g) {
          int32_t number = Group(g, n);
          bound.least[g] = bound.is_empty ? number : std::min(bound.least[g], number);
          bound.most[g] = bound.is_empty ? number : std::max(bound.most[g], number);
        }
        bound.is_empty = false;
      }
    }
    return bounds;
  }

  void PackTile(int64_t head, int64_t tile) const {
    int64_t apart = p_.K * p_.D;
    for (int64_t n = tile * kKeys; n < (tile + 1) * kKeys; n += P::kCols) {
      int64_t here = std::clamp<int64_t>(p_.N - n, 0, P::kCols);
      const X* from = Typed(p_.k) + std::min(n, p_.N - 1) * apart + head * p_.D;
      P::template Pack<P::kCols>(from, apart, here, p_.D, 1.0f, Keys(head) + n * p_.D);
    }
    for (int64_t n = tile * kKeys; n < (tile + 1) * kKeys; ++n) {
      float* to = Values(head) + n * width_;
      int64_t here = n < p_.N ? p_.V : 0;
      const X* from = Typed(p_.v) + (std::min(n, p_.N - 1) * p_.K + head) * p_.V;
      for (int64_t d = 0; d < here; ++d) to[d] = ToFloat(from[d]);
      std::fill(to + here, to + width_, 0.0f);
    }
  }

  void AttendBlock(int64_t head, int64_t block) const {
    static thread_local Memory memory[3];
    const Bound& queries = of_queries_[block];
    int64_t first = block * kBlock, rows = std::min(kBlock, p_.N - first), of_keys = head / (p_.H / p_.K);
    float* q = Scratch<float>(memory[0], (kBlock + P::kRows) * p_.D);
    float* scores = Scratch<float>(memory[1], kBlock * kKeys);
    float* o = Scratch<float>(memory[2], kBlock * width_);
    float top[kBlock], total[kBlock];
    std::fill(o, o + kBlock * width_, 0.0f), std::fill(top, top + kBlock, kLowest), std::fill(total, total + kBlock, 0.0f);
    for (int64_t r = 0; r < rows; r += P::kRows) {
      const X* from = Typed(p_.q) + ((first + r) * p_.H + head) * p_.D;
      P::template Pack<P::kRows>(from, p_.H * p_.D, std::min(P::kRows, rows - r), p_.D, p_.scale, q + r * p_.D);
    }
    for (int64_t n = 0; n < count_; n += kKeys) {
      const Bound& keys = of_keys_[n / kKeys];
      if (!keys.Meets(queries)) continue;
      int64_t slots = std::min(kKeys, count_ - n), whole = (slots + P::kCols - 1) / P::kCols * P::kCols;
      for (int64_t slot = 0; slot < whole; slot += P::kCols) {
        for (int64_t r = 0; r < rows; r += P::kRows) {
          P::template Multiply<1, P::kRows>(std::min(P::kRows, rows - r), q + r * p_.D, Keys(of_keys) + (n + slot) * p_.D, P::kCols,
                                            p_.D, scores + r * kKeys + slot, kKeys, false);
        }
      }
      bool sees_all = keys.IsOne() && queries.IsOne();
      float unseen[kKeys];
      for (int64_t r = 0; r < rows; ++r) {
        if (!sees_all) Mask(first + r, r == 0, n, whole, unseen, scores + r * kKeys);
        float alpha = UpdateSoftmax(scores + r * kKeys, whole, top + r, total + r);
        if (alpha == 1.0f) continue;
        for (int64_t d = 0; d < width_; d += L::kCount) {
          L::Store(o + r * width_ + d, L::Mul(L::Load(o + r * width_ + d), L::Set(alpha)));
        }
      }
      for (int64_t d = 0; d < width_; d += P::kCols) {
        if (d >= p_.V) break;
        for (int64_t r = 0; r < rows; r += P::kRows) {
          P::template Multiply<kKeys, 1>(std::min(P::kRows, rows - r), scores + r * kKeys, Values(of_keys) + n * width_ + d, width_,
                                         slots, o + r * width_ + d, width_, true);
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      bool has_seen = total[r] > 0 && Group(0, first + r) >= 0;
      for (int64_t d = 0; d < p_.V; ++d) {
        float value = has_seen ? o[r * width_ + d] / total[r] : 0.0f;
        int64_t place = ((first + r) * p_.H + head) * p_.V + d;
        if (p_.in_bf16) {
          static_cast<bf16*>(p_.o)[place] = ToBf16(value);
        } else {
          static_cast<float*>(p_.o)[place] = value;
        }
      }
    }
  }

  // Takes kNever for the scores of keys from n on that query t does not see. unseen: of the query before, whose groups may be
  // the same.
  void Mask(int64_t t, bool is_first, int64_t n, int64_t slots, float* unseen, float* scores) const {
    bool is_same = !is_first;
    for (int64_t g = 0; is_same && g < p_.G; ++g) is_same = Group(g, t) == Group(g, t - 1);
    if (!is_same) {
      for (int64_t i = 0; i < slots; ++i) {
        bool sees = n + i < p_.N && Group(0, n + i) >= 0;
        for (int64_t g = 0; sees && g < p_.G; ++g) sees = Group(g, n + i) == Group(g, t);
        unseen[i] = sees ? 0.0f : kNever;
      }
    }
    for (int64_t i = 0; i < slots; ++i) scores[i] = unseen[i] < 0 ? kNever : scores[i];
  }

  // Turns a query's scores into weights, and updates its running maximum and sum; returns the factor for what it has
  // accumulated.
  static float UpdateSoftmax(float* scores, int64_t slots, float* top, float* total) {
    typename L::Floats most = L::Load(scores);
    for (int64_t i = L::kCount; i < slots; i += L::kCount) most = L::Max(most, L::Load(scores + i));
    float before = *top;
    *top = std::max(before, L::Largest(most));
    typename L::Floats sum = L::Zero(), base = L::Set(*top);
    for (int64_t i = 0; i < slots; i += L::kCount) {
      typename L::Floats weight = Exp<L>(L::Sub(L::Load(scores + i), base));
      L::Store(scores + i, weight), sum = L::Add(sum, weight);
    }
    float alpha = before == *top ? 1.0f : std::exp(before - *top);
    *total = std::fma(*total, alpha, L::Sum(sum));
    return alpha;
  }

  const GroupProblem& p_;
  int64_t keys_, width_, count_;
  std::vector<Bound> of_keys_, of_queries_;
};

template <typename L>
void AttendGroupsInF32(ffi::ThreadPool& pool, const GroupProblem& p) {
  if (p.N == 0) return;
  if (p.in_bf16) {
    F32GroupAttention<L, bf16>(p).Attend(pool);
  } else {
    F32GroupAttention<L, float>(p).Attend(pool);
  }
}

}  // namespace jpaged
