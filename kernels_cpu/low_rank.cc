// What adapters add to a product: y += (x . a^T) . b for each token with the pair (a, b) of its own slot. The pairs of
// slots that no token has are not read, and a token without an adapter is not touched. An element's sums run in one order
// whatever else is computed, so a row's bits depend on it alone.
#include "low_rank.h"

#include "calls.h"
#include "experts.h"

namespace jpaged {
namespace {

constexpr int64_t kStrip = 1024, kBatch = 256;  // outputs and tokens of an item of work

// Tokens in the order of their slots: those of one slot.
struct Group {
  int64_t slot, first, count;
};

// y holds the product without adapters, and is changed in place. a [parts, slots, rank, E]; E is 0 where x [T, parts * rank]
// is what it would give. b: of each part [slots, rank, N]. In a row of y the first of `leads` equal pieces of each part's
// outputs follow each other, then the second ones.
ffi::Error LowRank(ffi::ThreadPool pool, Float32<2> y, Bf16<2> x, Bf16<4> a, Int32<1> slot, Int32<0> count,
                   ffi::RemainingArgs b, ffi::Result<Float32<2>> out, int64_t leads) {
  int64_t T = std::clamp<int64_t>(count.typed_data()[0], 0, x.dimensions()[0]), width = y.dimensions()[1];
  int64_t parts = a.dimensions()[0], slots = a.dimensions()[1], rank = a.dimensions()[2], E = a.dimensions()[3];
  const int32_t* slot_of = slot.typed_data();
  auto has_adapter = [&](int64_t t) { return slot_of[t] >= 0 && slot_of[t] < slots; };
  std::vector<int64_t> next(slots + 1);  // of each slot the place of its next token
  for (int64_t t = 0; t < T; ++t) {
    if (has_adapter(t)) ++next[slot_of[t] + 1];
  }
  std::vector<Group> groups;
  for (int64_t i = 0; i < slots; ++i) {
    for (int64_t done = 0; done < next[i + 1]; done += kBatch) {
      groups.push_back({i, next[i] + done, std::min(kBatch, next[i + 1] - done)});
    }
    next[i + 1] += next[i];
  }
  int64_t tokens = next[slots];
  std::vector<int64_t> token(tokens);
  for (int64_t t = 0; t < T; ++t) {
    if (has_adapter(t)) token[next[slot_of[t]]++] = t;
  }
  static thread_local std::vector<float> memory;  // [parts, tokens, rank]
  if (static_cast<int64_t>(memory.size()) < parts * tokens * rank) memory.resize(parts * tokens * rank);
  float* h = memory.data();
  if (E > 0) {
    Pairs pairs{std::vector<const bf16*>(parts * tokens), std::vector<float*>(parts * tokens)};
    std::vector<Expert> experts;
    for (int64_t part = 0; part < parts; ++part) {
      for (int64_t i = 0; i < tokens; ++i) {
        pairs.x[part * tokens + i] = Data(x) + token[i] * E;
        pairs.y[part * tokens + i] = h + (part * tokens + i) * rank;
      }
      for (const Group& group : groups) {
        experts.push_back({Data(a) + (part * slots + group.slot) * rank * E, part * tokens + group.first, group.count});
      }
    }
    MultiplyExperts(pool, pairs, experts, rank, E);
  } else {
    for (int64_t place = 0; place < parts * tokens * rank; ++place) {
      int64_t r = place % rank, i = place / rank % tokens, part = place / rank / tokens;
      h[place] = FromBf16(Data(x)[(token[i] * parts + part) * rank + r]);
    }
  }
  struct Item {
    const Group* group;
    const bf16* b;                           // of the group's slot, from its first output on
    int64_t part, N, column, width, pieces;  // column: of y, the first one
  };
  std::vector<Item> items;
  int64_t before = 0;  // outputs of a piece, of the parts before
  for (int64_t part = 0; part < parts; ++part) {
    auto table = b.get<Bf16<3>>(part);
    if (!table.has_value()) return table.error();
    int64_t N = table->dimensions()[2], piece = N / leads, at_once = std::max<int64_t>(1, kStrip / piece);
    for (const Group& group : groups) {
      const bf16* of_slot = Data(*table) + group.slot * rank * N;
      for (int64_t lead = 0; lead < leads; lead += at_once) {
        for (int64_t n = 0; n < piece; n += kStrip) {
          items.push_back({&group, of_slot + lead * piece + n, part, N, lead * (width / leads) + before + n,
                           std::min(kStrip, piece - n), std::min(at_once, leads - lead)});
        }
      }
    }
    before += piece;
  }
  ParallelFor(pool, items.size(), [&](int64_t i) {
    const Item& item = items[i];
    const float* from[kBatch];
    float* to[kBatch];
    for (int64_t piece = 0; piece < item.pieces; ++piece) {
      for (int64_t t = 0; t < item.group->count; ++t) {
        int64_t place = item.group->first + t;
        from[t] = h + (item.part * tokens + place) * rank;
        to[t] = out->typed_data() + token[place] * width + item.column + piece * (width / leads);
      }
      AddLowRank(from, to, item.group->count, item.b + piece * (item.N / leads), rank, item.N, item.width);
    }
  });
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_low_rank, jpaged::LowRank,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Float32<2>>()
                                  .Arg<jpaged::Bf16<2>>()
                                  .Arg<jpaged::Bf16<4>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .RemainingArgs()
                                  .Ret<jpaged::Float32<2>>()
                                  .Attr<int64_t>("leads"));
