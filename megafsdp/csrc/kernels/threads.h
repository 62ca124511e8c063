// Work cut into ranges over threads, and the mode for subnormal numbers.
#pragma once

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace megafsdp {

// The fewest elements for one thread: with fewer, waking it takes as long as the work.
constexpr int64_t kMinRangeNumel = 1 << 15;

// While it lives, this thread treats subnormal operands and results as zero if asked to; otherwise
// it computes with subnormal numbers, whatever mode it was in.
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

// Spins until met() is true, or for a few times what it takes to wake a thread: a thread that must
// wait longer may as well sleep.
template <typename Condition>
void look_out(const Condition& met) {
  constexpr std::chrono::microseconds kLongest(100);
  constexpr int kPauses = 32;
  const auto end = std::chrono::steady_clock::now() + kLongest;
  while (std::chrono::steady_clock::now() < end) {
    for (int pause = 0; pause < kPauses; ++pause) {
      if (met()) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  }
}

// Asks the system for short time slices of this thread. It then gets its core as soon as it wakes,
// even from a thread that spins there, as OpenMP's do for milliseconds after each of torch's
// operators; with usual slices Linux (6.12 and later) lets the other thread finish its slice first.
// Systems that do not know this request leave the thread as it is.
inline void ask_for_short_turns() {
#if defined(SYS_sched_getattr) && defined(SYS_sched_setattr)
  // The kernel's struct sched_attr, which no header of the C library declares before glibc 2.41.
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline_ns, period_ns;
  } turns{};
  if (syscall(SYS_sched_getattr, 0, &turns, sizeof(turns), 0) != 0) return;
  if (turns.policy != SCHED_OTHER) return;
  turns.runtime_ns = 100'000;
  syscall(SYS_sched_setattr, 0, &turns, 0);
#endif
}

// The number of this thread among those that share a call's work; 0 for a thread that is no worker.
inline int64_t& thread_number() {
  thread_local int64_t number = 0;
  return number;
}

// Threads that wait between calls, as many as the largest call has asked for. They spin a while for
// the next call before they sleep: buffers of a model are stepped one right after the other.
//
// A call hands out one task. Workers that have not woken when the caller has finished are not
// waited for, so a task whose work any thread may take loses nothing to threads that sleep long.
class Workers {
 public:
  static Workers& instance() {
    Workers* workers = slot().load(std::memory_order_acquire);
    if (workers != nullptr) return *workers;
    // Never freed: threads still wait in it when the process ends. The child of a fork has none of
    // the threads, and begins with new ones.
    static const int registered = pthread_atfork(nullptr, nullptr, [] { slot().store(nullptr); });
    (void)registered;
    auto* fresh = new Workers;
    if (slot().compare_exchange_strong(workers, fresh)) return *fresh;
    delete fresh;
    return *workers;
  }

  // Calls task() in this thread and in num_helpers others at most, fewer if the system gives no
  // more or another call is under way. The task must not throw.
  template <typename Task>
  void run(int64_t num_helpers, const Task& task) {
    if (num_helpers <= 0 || !busy_.try_lock()) {
      task();
      return;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      hire(num_helpers);
      keep_off_this_core();
      task_ = &task;
      call_ = [](const void* erased) { (*static_cast<const Task*>(erased))(); };
      num_wanted_ = num_hired_ < num_helpers ? num_hired_ : num_helpers;
    }
    wake_.notify_all();
    task();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      num_wanted_ = 0;
    }
    look_out([this] { return num_running_ == 0; });
    {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [this] { return num_running_ == 0; });
    }
    busy_.unlock();
  }

 private:
  static std::atomic<Workers*>& slot() {
    static std::atomic<Workers*> workers{nullptr};
    return workers;
  }

  void hire(int64_t num_helpers) {
    threads_.reserve(num_helpers);
    try {
      while (num_hired_ < num_helpers) {
        std::thread worker([this, number = num_hired_ + 1] { serve(number); });
        threads_.push_back(worker.native_handle());
        worker.detach();
        ++num_hired_;
        core_ = -1;
      }
    } catch (const std::system_error&) {
      // The system gives no more threads: those that are there do the work.
    }
  }

  // Limits the workers to the cores that this thread may use, without the one that it runs on. A
  // system that sees no shared cache between the cores, as in many virtual machines, would wake
  // them on this core, to run in turn with this thread, though other cores are idle.
  void keep_off_this_core() {
#if defined(__linux__)
    const int core = sched_getcpu();
    if (core == core_ || core < 0) return;
    core_ = core;
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof(cores), &cores) != 0 || CPU_COUNT(&cores) < 2) return;
    CPU_CLR(core, &cores);
    for (const pthread_t thread : threads_) pthread_setaffinity_np(thread, sizeof(cores), &cores);
#endif
  }

  void serve(int64_t number) {
    thread_number() = number;
    ask_for_short_turns();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      if (num_wanted_ > 0) {
        --num_wanted_;
        ++num_running_;
        lock.unlock();
        call_(task_);
        lock.lock();
        if (--num_running_ == 0) done_.notify_one();
      } else {
        // A worker that wakes too late for one call spins for the next: if it slept at once, it
        // would be late for that one too.
        wake_.wait(lock);
        if (num_wanted_ > 0) continue;
      }
      lock.unlock();
      look_out([this] { return num_wanted_ > 0; });
      lock.lock();
    }
  }

  std::mutex busy_, mutex_;
  std::condition_variable wake_, done_;
  const void* task_ = nullptr;
  void (*call_)(const void*) = nullptr;
  int64_t num_hired_ = 0;
  std::vector<pthread_t> threads_;
  // The core of the last calling thread; -1 before the first call.
  int core_ = -1;
  // Written with the mutex held; read without it by threads that spin.
  std::atomic<int64_t> num_wanted_{0}, num_running_{0};
};

// Ranges for each thread: more than one, so that a thread that loses its core leaves the rest to
// the others.
constexpr int64_t kRangesPerThread = 8;

// Calls work(start, stop) on ranges that cut 0 to count, each start a multiple of grain and no
// range but the last shorter than min_range; in this thread and num_threads - 1 others at most.
template <typename Work>
void parallel_ranges(int64_t count, int64_t grain, int64_t min_range, int64_t num_threads,
                     const Work& work) {
  if (num_threads <= 1 || count <= min_range) {
    work(int64_t{0}, count);
    return;
  }
  const int64_t num_wished = num_threads * kRangesPerThread;
  const int64_t fair = (count + num_wished - 1) / num_wished;
  const int64_t least = fair > min_range ? fair : min_range;
  const int64_t range = (least + grain - 1) / grain * grain;
  const int64_t num_ranges = (count + range - 1) / range;
  const int64_t num_parts = num_threads < num_ranges ? num_threads : num_ranges;
  struct alignas(64) Part {
    std::atomic<int64_t> next;
    int64_t end;
  };
  // Each thread begins with a part that is the same in every call of that size, so that a pass over
  // a buffer finds in its core's caches what the previous pass left there. Then it helps the
  // others.
  std::vector<Part> parts(static_cast<size_t>(num_parts));
  for (int64_t part = 0; part < num_parts; ++part) {
    parts[part].next.store(part * num_ranges / num_parts, std::memory_order_relaxed);
    parts[part].end = (part + 1) * num_ranges / num_parts;
  }
  Workers::instance().run(num_parts - 1, [&] {
    for (int64_t turn = 0; turn < num_parts; ++turn) {
      Part& part = parts[(thread_number() + turn) % num_parts];
      for (;;) {
        const int64_t index = part.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= part.end) break;
        const int64_t start = index * range;
        work(start, start + range < count ? start + range : count);
      }
    }
  });
}

}  // namespace megafsdp
