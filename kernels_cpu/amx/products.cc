// Products with AMX tiles: what is multiplied, and what becomes of the sums; see bf16_products.h.
#include "bf16_products.h"
#include "level.h"

namespace jpaged::amx {
namespace {

// A weight [N, E].
class Linear {
 public:
  Linear(const bf16* w, int64_t N, int64_t E) : w_(w), N_(N), E_(E) {}

  GroupRows Group(int64_t group, int64_t steps) const {
    const bf16 *rows = Rows(group), *next = Rows(group + 1);
    return {{rows, rows + kSide * E_}, {next, next + kSide * E_}, E_, steps};
  }

 private:
  const bf16* Rows(int64_t group) const {
    const bf16* from = w_ + group * kGroup * E_;
    if (group * kGroup >= N_ || (group + 1) * kGroup <= N_) return from;
    static thread_local Memory memory;  // a tile reads all of its rows
    bf16* padded = Scratch<bf16>(memory, kGroup * E_);
    int64_t count = (N_ - group * kGroup) * E_;
    std::copy_n(from, count, padded), std::fill_n(padded + count, kGroup * E_ - count, 0);
    return padded;
  }

  const bf16* w_;
  int64_t N_, E_;
};

// Gate and up [2, F, E]: a group has 16 rows of both.
class GateUp {
 public:
  GateUp(const bf16* w, int64_t F, int64_t E) : w_(w), F_(F), E_(E) {}

  GroupRows Group(int64_t group, int64_t steps) const {
    const bf16 *gate = w_ + group * kSide * E_, *next = gate + kSide * E_;
    return {{gate, gate + F_ * E_}, {next, next + F_ * E_}, E_, steps};
  }

 private:
  const bf16* w_;
  int64_t F_, E_;
};

// Returns how x is cut for N outputs. Threads that have blocks of their own find the rows of x in their own caches, and leave the rows
// of the result there for the next operation, which divides rows too; but each block reads the whole weight. So there are as many
// blocks as leave a thread's share of a block at most twice as many outputs as rows.
Blocking BlockingOf(ffi::ThreadPool& pool, int64_t T, int64_t N) {
  int64_t threads = NumThreads(pool), blocks = 1;
  while (blocks < threads && (blocks + 1) * (blocks + 1) * N <= 2 * threads * T) ++blocks;
  return {kBlocking.bytes, blocks};
}

// Returns how many items of work a thread has. One that is done waits for another's last item, so they are smaller where x is not cut
// into many blocks. But what an item begins and ends with has no products beside it, and few rows have little else.
int64_t ItemsOfThread(ffi::ThreadPool& pool, const Blocking& blocking, int64_t T, int64_t E) {
  return T < 256 || blocking.Count(T, E) > NumThreads(pool) ? 8 : 16;
}

// y of packed rows.
template <typename Out>
void MultiplyPacked(ffi::ThreadPool& pool, const bf16* packed, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  RowWriter writer = WriterOf(y, T, N);
  Blocking blocking = BlockingOf(pool, T, N);
  auto work = [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
    MultiplyBlock(packed, first, last, E, begin, end, Linear(w, N, E), writer);
  };
  ForBlocks(pool, blocking, T, E, (N + kGroup - 1) / kGroup, ItemsOfThread(pool, blocking, T, E), work);
}

template <typename Out>
void MultiplyTo(ffi::ThreadPool& pool, const bf16* x, const bf16* w, Out* y, int64_t T, int64_t N, int64_t E) {
  if (T > 0) MultiplyPacked(pool, Pack(pool, x, T, E), w, y, T, N, E);
}

template <Activation kind>
const bf16* MultiplyGated(ffi::ThreadPool& pool, const bf16* packed, const bf16* w, int64_t T, int64_t F, int64_t E) {
  static thread_local Memory memory;
  bf16* h = Scratch<bf16>(memory, Packed(T, F));
  GatedWriter<kind> writer(h, T, F, nullptr, PairOrder::kNatural);
  auto work = [&](int64_t first, int64_t last, int64_t begin, int64_t end) {
    MultiplyBlock(packed, first, last, E, begin, end, GateUp(w, F, E), writer);
  };
  ForBlocks(pool, kBlocking, T, E, F / kSide, ItemsOfThread(pool, kBlocking, T, E), work);
  return h;
}

template <typename Out>
void MlpTo(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, Out* y, int64_t T, int64_t N,
           int64_t E, int64_t F) {
  auto gate = kind == Activation::kSilu ? &MultiplyGated<Activation::kSilu> : &MultiplyGated<Activation::kGeluTanh>;
  MultiplyPacked(pool, gate(pool, Pack(pool, x, T, E), gate_up, T, F, E), down, y, T, N, F);
}
}  // namespace

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, float* y, int64_t T, int64_t N, int64_t E) {
  MultiplyTo(pool, x, w, y, T, N, E);
}

void Multiply(ffi::ThreadPool& pool, const bf16* x, const bf16* w, bf16* y, int64_t T, int64_t N, int64_t E) {
  MultiplyTo(pool, x, w, y, T, N, E);
}

void Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, float* y, int64_t T, int64_t N,
         int64_t E, int64_t F) {
  MlpTo(pool, kind, x, gate_up, down, y, T, N, E, F);
}

void Mlp(ffi::ThreadPool& pool, Activation kind, const bf16* x, const bf16* gate_up, const bf16* down, bf16* y, int64_t T, int64_t N,
         int64_t E, int64_t F) {
  MlpTo(pool, kind, x, gate_up, down, y, T, N, E, F);
}

// The unit of work is a strip of one expert's weight, for all of its tokens.
void MultiplyExperts(ffi::ThreadPool& pool, const Pairs& pairs, const std::vector<Expert>& experts, int64_t N, int64_t E) {
  constexpr int64_t kStripBytes = 256 * 1024;
  std::vector<int64_t> tiles(1);  // of x, before those of each expert
  for (const Expert& expert : experts) tiles.push_back(tiles.back() + TilesOf(expert.count));
  static thread_local Memory memory;
  bf16* packed = Scratch<bf16>(memory, tiles.back() * kSide * E);
  ParallelFor(pool, experts.size(), [&](int64_t i) {
    auto from = [&](int64_t t) { return pairs.x[experts[i].first + t]; };
    for (int64_t tile = 0; tile < tiles[i + 1] - tiles[i]; ++tile) {
      PackRows(from, experts[i].count, E, tile, PairOrder::kNatural, kSide, packed + tiles[i] * kSide * E);
    }
  });
  int64_t groups = (N + kGroup - 1) / kGroup, of_strip = std::max<int64_t>(1, kStripBytes / (2 * kGroup * E));
  int64_t strips = (groups + of_strip - 1) / of_strip;
  ParallelFor(pool, experts.size() * strips, [&](int64_t item) {
    Tiles tiles_of_this_thread;
    int64_t i = item / strips, strip = item % strips, T = experts[i].count;
    auto to = [&](int64_t t) { return pairs.y[experts[i].first + t]; };
    Linear weight(experts[i].w, N, E);
    RowWriter<decltype(to), false> writer(T, N, to, nullptr, false);
    for (int64_t block = 0; block < kBlocking.Count(T, E); ++block) {
      int64_t first = kBlocking.First(block, T, E), last = kBlocking.First(block + 1, T, E);
      int64_t begin = groups * strip / strips, end = groups * (strip + 1) / strips;
      MultiplyBlock(packed + tiles[i] * kSide * E, first, last, E, begin, end, weight, writer);
    }
  });
}

}  // namespace jpaged::amx
