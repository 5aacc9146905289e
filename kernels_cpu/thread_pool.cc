// What kernels.h says of XLA's pool.
#include "calls.h"

namespace jpaged {

int64_t NumThreads(ffi::ThreadPool& pool) { return pool.num_threads(); }

void Schedule(ffi::ThreadPool& pool, void (*task)(void* data), void* data) {
  pool.Schedule([task, data] { task(data); });
}

}  // namespace jpaged
