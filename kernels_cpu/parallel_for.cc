// The loop of kernels.h whose iterations are divided between threads.
#include <atomic>
#include <memory>
#include <thread>

#include "kernels.h"

namespace jpaged {
namespace {

// Tells the processor that this thread spins.
void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A counter that threads write has a cache line of its own: in a line that another core has just written, an addition takes as long
// as some items do.
struct alignas(kCacheLine) Counter {
  std::atomic<int64_t> value{0};
};

// A loop under way. A helper that comes late, when the caller may have returned, finds no item left and touches nothing but this.
struct Loop {
  Loop(int64_t items, int64_t workers, void (*call)(const void* body, int64_t i), const void* body)
      : items(items), workers(workers), call(call), body(body), next(workers) {
    for (int64_t part = 0; part < workers; ++part) next[part].value = Begin(part);
  }

  const int64_t items, workers;
  void (*const call)(const void* body, int64_t i);
  const void* const body;
  std::vector<Counter> next;  // of each worker's part the next item
  Counter done;               // items of threads that have found no more

  int64_t Begin(int64_t part) const { return items * part / workers; }

  void Work(int64_t worker) {
    int64_t count = 0;
    for (int64_t i = worker; i < worker + workers; ++i) {
      int64_t part = i % workers, end = Begin(part + 1);
      for (int64_t item; (item = next[part].value.fetch_add(1)) < end; ++count) {
        call(body, item);
      }
    }
    done.value.fetch_add(count, std::memory_order_release);
  }
};

struct Helper {
  std::shared_ptr<Loop> loop;
  int64_t worker;
};
}  // namespace

void ParallelFor(ffi::ThreadPool& pool, int64_t items, void (*call)(const void* body, int64_t i), const void* body) {
  int64_t workers = std::max<int64_t>(1, std::min<int64_t>(items, NumThreads(pool)));
  auto loop = std::make_shared<Loop>(items, workers, call, body);
  for (int64_t worker = 1; worker < workers; ++worker) {
    auto task = [](void* data) {
      std::unique_ptr<Helper> helper(static_cast<Helper*>(data));
      helper->loop->Work(helper->worker);
    };
    Schedule(pool, task, new Helper{loop, worker});
  }
  loop->Work(0);
  for (int spins = 0; loop->done.value.load(std::memory_order_acquire) < items; ++spins) {
    if (spins < 4096) {
      Pause();
    } else {
      std::this_thread::yield();
    }
  }
}

}  // namespace jpaged
