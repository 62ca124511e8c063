// Zeros by the threads that will work on the memory, so that its pages are near them.
#pragma once

#include <cstdint>
#include <cstring>

#include "threads.h"

namespace megafsdp {

// A page belongs to the memory of the processor whose thread touches it first.
constexpr int64_t kHugePageNbytes = int64_t{1} << 21;

inline void zero_bytes(unsigned char* bytes, int64_t nbytes, int64_t num_threads) {
  parallel_ranges(nbytes, kHugePageNbytes, kHugePageNbytes, num_threads,
                  [&](int64_t start, int64_t stop) {
                    std::memset(bytes + start, 0, static_cast<size_t>(stop - start));
                  });
}

}  // namespace megafsdp
