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

#if defined(__linux__) && defined(MADV_HUGEPAGE)
// Lets the kernel take huge pages, each of which is there whole with the first of its bytes, for equal parts of memory that are
// written from their beginnings on. Where a part begins shortly before the end of a huge page, that one keeps small pages: its
// other bytes are the end of the part before, which may never be used. A kernel without huge pages refuses, and nothing is lost.
inline void UseHugePages(char* begin, char* end, int64_t parts) {
  constexpr intptr_t kHuge = 2 << 20, kLeast = kHuge / 8;
  intptr_t page = sysconf(_SC_PAGESIZE), size = (end - begin) / parts;
  char* first = begin + (-reinterpret_cast<intptr_t>(begin) & (page - 1));
  char* last = end - (reinterpret_cast<intptr_t>(end) & (page - 1));
  if (first >= last || madvise(first, last - first, MADV_HUGEPAGE) != 0) return;
  for (int64_t part = 1; part < parts; ++part) {
    char* border = begin + part * size;
    intptr_t before = reinterpret_cast<intptr_t>(border) & (kHuge - 1);
    if (size >= kHuge && kHuge - before < kLeast) madvise(border - before, kHuge, MADV_NOHUGEPAGE);
  }
}
#endif

// Makes all bytes zeros. parts: of what is written from its beginning on, which may lie on huge pages; 0: none do.
inline void MakeZeros(char* begin, char* end, int64_t parts) {
#if defined(__linux__)
  intptr_t page = sysconf(_SC_PAGESIZE);
  char* first = begin + (-reinterpret_cast<intptr_t>(begin) & (page - 1));
  char* last = end - (reinterpret_cast<intptr_t>(end) & (page - 1));
  if (first < last && DropPages(first, last)) {
    std::memset(begin, 0, first - begin);
    std::memset(last, 0, end - last);
#if defined(MADV_HUGEPAGE)
    if (parts > 0) UseHugePages(begin, end, parts);
#endif
    return;
  }
#endif
  std::memset(begin, 0, end - begin);
}
}  // namespace jpaged
