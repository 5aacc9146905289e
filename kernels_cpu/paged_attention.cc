// The call of paged_attention.h from XLA: divides the queries into items.
#include "paged_attention.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "calls.h"

namespace jpaged {
namespace {

// Into how many equal parts H query heads of latents are cut: at least `least` if that can be, none of more heads than an item
// has.
int64_t Parts(int64_t H, int64_t least) {
  int64_t parts = std::clamp<int64_t>(std::max(least, (H + MostQueries() - 1) / MostQueries()), 1, H);
  while (H % parts != 0) ++parts;
  return parts;
}

// Returns into how many parts to cut pieces of up to `largest` slots, of `total`, so that no thread works for long alone: for
// up to 0.6 of its share.
int64_t PartsOf(int64_t largest, int64_t total, int64_t threads) {
  return std::max<int64_t>(1, (5 * largest * (threads - 1) + 3 * total - 1) / std::max<int64_t>(1, 3 * total));
}

// Puts the longest items first, and as much work in the part of each of so many threads: what is left at the end is short.
void Deal(std::vector<Item>& items, int64_t threads) {
  auto work = [](const Item& item) { return item.count * (item.end - item.begin); };
  std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return work(a) > work(b); });
  std::vector<Item> dealt(items.size());
  int64_t count = items.size(), next = 0;
  for (int64_t round = 0; next < count; ++round) {
    for (int64_t thread = 0; thread < threads; ++thread) {
      int64_t i = count * thread / threads + round;  // parts as ParallelFor has them
      if (i < count * (thread + 1) / threads) dealt[i] = items[next++];
    }
  }
  items = std::move(dealt);
}

ffi::Error PagedAttention(ffi::ThreadPool pool, Bf16<3> q, ffi::AnyBuffer kv, Float32<3> scales, Int32<0> layer, Int32<2> table,
                          Int32<1> contexts, Int32<1> starts, Float32<1> sinks, Int32<1> ends, ffi::Result<Bf16<3>> o,
                          int64_t num_layers, float scale, int64_t window, float soft_cap, bool decode, bool latent) {
  // With AMX scores are scaled after their maximum is known.
  if (!(scale > 0)) return ffi::Error::InvalidArgument("scale " + std::to_string(scale) + ": scores are multiplied by one above 0");
  auto q_shape = q.dimensions(), kv_shape = kv.dimensions();
  Problem p{.q = Data(q), .pool = kv.untyped_data(), .scales = scales.typed_data(), .o = Data(*o)};
  auto attend = kv.element_type() == ffi::S8 ? &AttendInt8 : kv.element_type() == ffi::F8E4M3FN ? &AttendE4m3 : &Attend;
  p.table = table.typed_data(), p.contexts = contexts.typed_data(), p.starts = starts.typed_data();
  p.sinks = sinks.element_count() > 0 ? sinks.typed_data() : nullptr;
  p.ends = ends.element_count() > 0 ? ends.typed_data() : nullptr;
  p.T = q_shape[0], p.H = q_shape[1], p.D = q_shape[2], p.S = table.dimensions()[0], p.M = table.dimensions()[1];
  p.P = kv_shape[1], p.V = o->dimensions()[2], p.latent = latent;
  p.first_block = layer.typed_data()[0] * (kv_shape[0] / num_layers);
  p.window = window, p.scale = scale, p.soft_cap = soft_cap, p.decode = decode;

  int64_t served = 0, threads = NumThreads(pool), total = 0, longest = 0, rows = 0;
  auto first_seen = [&](int64_t position) { return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0; };
  for (int64_t s = 0; s < p.S; ++s) {
    int64_t length = std::max<int64_t>(0, p.contexts[s]) - (decode ? first_seen(p.contexts[s] - 1) : 0);
    total += std::max<int64_t>(0, length), longest = std::max(longest, length), rows += length > 0;
  }
  // Decode takes all heads of a row together, which lie together, and cuts the contexts of few rows into spans; where these are
  // too few as well, their heads into parts.
  bool is_cut = decode && PartsOf(longest, total, threads) > 1;
  int64_t parts = decode ? PartsOf(std::min(longest, is_cut ? kSpan : longest), total, threads) : 1;
  p.K = latent ? Parts(p.H, parts) : kv_shape[2] * kv_shape[3] / (p.D + p.V);
  p.G = p.H / p.K;
  int64_t most = std::max<int64_t>(1, MostQueries() / p.G);
  // Two items a thread at least, if shorter ones do: then a thread has a long one and a short one.
  if (!decode && p.T * p.K < 2 * threads * most) most = (most + 1) / 2;
  int64_t heads = decode && !latent ? std::max<int64_t>(1, p.K / parts) : 1;
  int64_t groups = (p.K + heads - 1) / heads;  // of heads
  auto spans_of = [&](int64_t begin, int64_t end) { return (end + kSpan - 1) / kSpan - begin / kSpan; };
  static thread_local Memory memory;
  std::vector<Spans> spans(is_cut ? rows * groups : 0);
  float* sums = nullptr;
  if (is_cut) {
    int64_t count = 0;
    for (int64_t s = 0; s < p.S; ++s) {
      if (p.contexts[s] > 0) count += spans_of(first_seen(p.contexts[s] - 1), p.contexts[s]);
    }
    sums = Scratch<float>(memory, count * p.H * (kSumsBefore + p.V));
  }
  int64_t cut = 0;  // of `spans`, how many are in use
  std::vector<Item> items;
  for (int64_t s = 0; s < p.S; ++s) {
    int64_t token = decode ? s : p.starts[s], count = decode ? 1 : p.starts[s + 1] - token;
    if (p.contexts[s] <= 0) continue;  // padding, whose tokens are zeros
    std::memset(p.o + served * p.H * p.V, 0, (token - served) * p.H * p.V * sizeof(bf16));
    served = token + count;
    for (int64_t i = 0; i < count; i += most) {
      int64_t n = std::min(most, count - i), position = p.contexts[s] - count + i;
      int64_t begin = first_seen(position), past = position + n;
      for (int64_t j = 0; p.ends != nullptr && j < n; ++j) past = std::max(past, Past(p, token + i + j, position + j));
      for (int64_t h = 0; h < p.K; h += heads) {
        Item item{s, token + i, n, position, begin, past, h, std::min(heads, p.K - h)};
        if (!is_cut || spans_of(begin, past) <= 1) {
          items.push_back(item);
          continue;
        }
        Spans& all = spans[cut++];
        all.sums = sums, all.count = spans_of(begin, past), all.left = all.count;
        sums += all.count * item.heads * p.G * (kSumsBefore + p.V);
        item.spans = &all;
        for (int64_t to; item.begin < past; item.begin = to, ++item.span) {
          to = item.end = std::min(past, (item.begin / kSpan + 1) * kSpan);
          items.push_back(item);
        }
      }
    }
  }
  std::memset(p.o + served * p.H * p.V, 0, (p.T - served) * p.H * p.V * sizeof(bf16));
  int64_t all = items.size(), runs = decode ? std::min(all, 8 * threads) : all, workers = std::min(runs, threads);
  if (!decode) Deal(items, workers);
  auto thread_of = [&](int64_t run) { return ((run + 1) * workers - 1) / runs; };  // whose part it is in ParallelFor
  ParallelFor(pool, runs, [&](int64_t run) {
    // What another thread begins with is not for this one to fetch.
    bool is_last = thread_of(run + 1) != thread_of(run);
    for (int64_t i = all * run / runs, end = all * (run + 1) / runs; i < end; ++i) {
      attend(p, items[i], i + 1 < end || !is_last ? &items[i + 1] : nullptr);
    }
  });
  return ffi::Error::Success();
}
}  // namespace
}  // namespace jpaged

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_paged_attention, jpaged::PagedAttention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<jpaged::Bf16<3>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<jpaged::Float32<3>>()
                                  .Arg<jpaged::Int32<0>>()
                                  .Arg<jpaged::Int32<2>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Arg<jpaged::Float32<1>>()
                                  .Arg<jpaged::Int32<1>>()
                                  .Ret<jpaged::Bf16<3>>()
                                  .Attr<int64_t>("num_layers")
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<bool>("decode")
                                  .Attr<bool>("latent"));
