// Work cut into ranges over threads, and the mode for subnormal numbers.
//
// Threads live for one call. Starting one takes tens of microseconds, which the smallest range
// outweighs, and nothing is left behind that a fork could break.
#pragma once

#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace megafsdp {

// While it lives, this thread takes and gives zero for subnormal numbers, if asked to; if not, it
// computes with them, whatever mode it was in.
class DenormalMode {
 public:
#if defined(__x86_64__)
  explicit DenormalMode(bool flushes) : saved_(_mm_getcsr()) {
    _mm_setcsr(flushes ? saved_ | kFlush : saved_ & ~kFlush);
  }
  ~DenormalMode() { _mm_setcsr(saved_); }
#else
  explicit DenormalMode(bool) {}
#endif
  DenormalMode(const DenormalMode&) = delete;
  DenormalMode& operator=(const DenormalMode&) = delete;

#if defined(__x86_64__)
 private:
  // Flush-to-zero for results, denormals-are-zero for operands.
  static constexpr unsigned kFlush = 0x8040;
  unsigned saved_;
#endif
};

// Calls work(start, stop) on ranges that cut 0 to count, each start a multiple of grain and no
// range but the last shorter than min_range; in this thread and num_threads - 1 others at most.
template <typename Work>
void parallel_ranges(int64_t count, int64_t grain, int64_t min_range, int64_t num_threads,
                     const Work& work) {
  const int64_t fair = (count + num_threads - 1) / num_threads;
  const int64_t least = fair > min_range ? fair : min_range;
  const int64_t range = (least + grain - 1) / grain * grain;
  std::vector<std::thread> threads;
  int64_t start = 0;
  try {
    for (; start + range < count; start += range) {
      threads.emplace_back([&work, start, range] { work(start, start + range); });
    }
  } catch (const std::system_error&) {
    // The system gives no more threads: this one does what is left.
  }
  work(start, count);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace megafsdp
