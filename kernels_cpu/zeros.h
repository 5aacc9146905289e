// Zeros in memory whose pages are not there before somebody writes to them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jpaged {

#if defined(__linux__)
// Gives whole pages back to the kernel, which has zeros in them when they are next used, and returns whether it did. Memory
// that is shared or a file's keeps its bytes and locked memory is refused, whatever allocator it is from: hence the mark.
inline bool DropPages(char* begin, char* end) {
  volatile char* mark = begin;
  *mark = 1;
  return madvise(begin, end - begin, MADV_DONTNEED) == 0 && *mark == 0;
}
#endif

// Makes all bytes zeros. huge: the kernel may take huge pages, each of which is there whole with the first of its bytes.
inline void MakeZeros(char* begin, char* end, bool huge) {
#if defined(__linux__)
  intptr_t page = sysconf(_SC_PAGESIZE);
  char* first = begin + (-reinterpret_cast<intptr_t>(begin) & (page - 1));
  char* last = end - (reinterpret_cast<intptr_t>(end) & (page - 1));
  if (first < last && DropPages(first, last)) {
    std::memset(begin, 0, first - begin);
    std::memset(last, 0, end - last);
#if defined(MADV_HUGEPAGE)
    if (huge) madvise(first, last - first, MADV_HUGEPAGE);  // a kernel without them refuses, and nothing is lost
#endif
    return;
  }
#endif
  std::memset(begin, 0, end - begin);
}
}  // namespace jpaged
