// The CUDA kernels of Adam and of the sum of squares with their threads in turn on the host, and
// the flushing of subnormal numbers beside that of the processor. A test compiles this; nothing of
// the package does.
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../../megafsdp/csrc/cuda/adam_tile.h"
#include "../../../megafsdp/csrc/cuda/late_constants.h"
#include "../../../megafsdp/csrc/cuda/square_lane.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using namespace megafsdp;

struct HostMath {
  static float add(float a, float b) { return a + b; }
  static float sub(float a, float b) { return a - b; }
  static float mul(float a, float b) { return a * b; }
  static float div(float a, float b) { return a / b; }
  static float root_over(float a, float b) { return __builtin_sqrtf(a) / b; }
  static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static float take(float a) { return flushed(a); }
};

struct Launch {
  const AdamTask& task;
  TileRange tiles;
  int64_t num_blocks;
};

template <typename Math, typename Grad, typename State, typename Weight>
void run_threads(const Launch& launch) {
  for (int64_t block = 0; block < launch.num_blocks; ++block) {
    for (int thread = 0; thread < kThreads; ++thread) {
      int row = 0;
      for (int64_t tile = launch.tiles.start + block; tile < launch.tiles.stop;
           tile += launch.num_blocks) {
        row = adam_tile<Math, Grad, State, Weight>(launch.task, tile, thread, row);
      }
    }
  }
}

template <typename Math, typename Grad, typename State>
void run_weight(const Launch& launch) {
  if (launch.task.buffers.remainder == nullptr) {
    run_threads<Math, Grad, State, float>(launch);
  } else {
    run_threads<Math, Grad, State, uint16_t>(launch);
  }
}

template <typename Math, typename Grad>
void run_state(const Launch& launch) {
  if (launch.task.buffers.state_dtype == Dtype::kFloat32) {
    run_weight<Math, Grad, float>(launch);
  } else {
    run_weight<Math, Grad, uint16_t>(launch);
  }
}

template <typename Math>
void run_grad(const Launch& launch) {
  if (launch.task.buffers.grad_dtype == Dtype::kFloat32) {
    run_state<Math, float>(launch);
  } else {
    run_state<Math, uint16_t>(launch);
  }
}

AdamConstants constants_at(const float* numbers, int64_t place) {
  AdamConstants constants;
  std::memcpy(&constants, numbers + 8 * place, sizeof constants);
  return constants;
}

#if defined(__x86_64__)
struct Operands {
  float a, b, c;
};

bool have_same_bits(float left, float right) {
  return std::memcmp(&left, &right, sizeof left) == 0;
}

__attribute__((target("fma"), noinline)) float fused(float a, float b, float c) {
  return _mm_cvtss_f32(_mm_fmadd_ss(_mm_set_ss(a), _mm_set_ss(b), _mm_set_ss(c)));
}

// The processor's results in its mode for subnormal numbers.
__attribute__((noinline)) void in_mode(const Operands& from, float* results) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);
  const volatile float a = from.a, b = from.b, c = from.c;
  volatile float product = a * b, quotient = a / b, sum = a + c, difference = a - c;
  const volatile float both = fused(a, b, c);
  _mm_setcsr(before);
  results[0] = product;
  results[1] = quotient;
  results[2] = sum;
  results[3] = difference;
  results[4] = both;
}
#endif

}  // namespace

extern "C" {

// Runs one step. Addresses are buffers; dtypes count as Dtype; ranges has start and stop of each
// segment, and constants eight numbers of each, which may be late. Returns how many launches it
// took.
int64_t emulate_adam(void* const* addresses, const int* dtypes, int64_t num_segments,
                     const int64_t* ranges, const float* constants, bool are_late, float grad_scale,
                     bool flushes, bool* is_aligned) {
  const AdamBuffers buffers{addresses[0],
                            static_cast<int16_t*>(addresses[1]),
                            addresses[2],
                            addresses[3],
                            addresses[4],
                            addresses[5],
                            static_cast<Dtype>(dtypes[0]),
                            static_cast<Dtype>(dtypes[1]),
                            static_cast<Dtype>(dtypes[2]),
                            grad_scale,
                            false};
  std::vector<AdamSegment> segments(num_segments);
  std::vector<AdamConstants> late(num_segments);
  for (int64_t i = 0; i < num_segments; ++i) {
    const AdamConstants own = constants_at(constants, i);
    segments[i] = {ranges[2 * i], ranges[2 * i + 1], flushes && !are_late ? flushed(own) : own};
    late[i] = own;
  }
  *is_aligned = has_vector_addresses(buffers);
  int64_t num_launches = 0;
  for (int64_t first = 0; first < num_segments;) {
    AdamTable table;
    const AdamConstants* const own = late.data() + first;
    first = fill_table(segments.data(), num_segments, first, are_late, table);
    if (table.num_rows == 0) continue;
    ++num_launches;
    const AdamTask task{buffers,
                        table.rows,
                        table.num_rows,
                        are_late ? own : table.constants,
                        flushes ? flushed(grad_scale) : grad_scale,
                        *is_aligned};
    const Launch launch{task, tiles_of(table, tile_numel_of(buffers)), 3};
    if (flushes) {
      run_grad<Flushing<FastZeros<HostMath>>>(launch);
    } else {
      run_grad<Keeping<FastZeros<HostMath>>>(launch);
    }
  }
  return num_launches;
}

// Counts steps and computes eight constants of each parameter from the fixed ones; numbers has four
// and flags two of each, in the order of LateHyper.
void emulate_late_constants(int64_t count, void* const* steps, void* const* rates,
                            const double* numbers, const bool* flags, const float* fixed,
                            bool skips, bool flushes, float* constants) {
  for (int64_t i = 0; i < count; ++i) {
    const double* const own = numbers + 4 * i;
    const LateHyper hyper{constants_at(fixed, i),
                          own[0],
                          own[1],
                          own[2],
                          own[3],
                          static_cast<float*>(steps[i]),
                          static_cast<const double*>(rates[i]),
                          flags[2 * i],
                          flags[2 * i + 1]};
    const AdamConstants found = late_constants(hyper, skips, flushes);
    std::memcpy(constants + 8 * i, &found, sizeof found);
  }
}

int64_t emulate_scratch_numel(int64_t numel) { return square_sum_scratch_numel(numel); }

// Sums the squares of some buffers; scratch is for one table of them, and there must not be more.
void emulate_square_sums(int count, void* const* values, const int64_t* numels, const int* dtypes,
                         double* sums, double* scratch) {
  std::vector<SquareSumValues> buffers(count);
  for (int i = 0; i < count; ++i)
    buffers[i] = {values[i], numels[i], static_cast<Dtype>(dtypes[i])};
  const SquareTable table = table_of(buffers.data(), count, scratch);
  for (int64_t number = 0; number < table.num_blocks; ++number) {
    const SquareRow& row = row_of(table.rows, table.count, number);
    double& sum = row.sums[number - row.first] = 0.0;
    for (int lane = 0; lane < kSquareLanes; ++lane) sum += lane_sum(row, number - row.first, lane);
  }
  for (RunTable runs = runs_of(table, sums); runs.count > 0; runs = runs_of(runs)) {
    for (int64_t number = 0; number < runs.num_runs; ++number) {
      const RunRow& row = row_of(runs.rows, runs.count, number);
      const int64_t start = (number - row.first) * kSquareRun, end = start + kSquareRun;
      double total = 0.0;
      for (int64_t i = start; i < end && i < row.count; ++i) total += row.sums[i];
      row.run_sums[number - row.first] = total;
    }
  }
}

// Counts operations on triples of floats whose flushed result is not the processor's own, at once
// or deferred and not in doubt; -1 where there is no such processor. at_border receives how many
// results were the smallest normal number where subnormal ones are kept, and zero where not;
// in_doubt how many deferred ones were in doubt.
int64_t count_flushing_differences(const float* triples, int64_t count, int64_t* at_border,
                                   int64_t* in_doubt) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) return -1;
  int64_t num_differences = 0;
  for (int64_t i = 0; i < count; ++i) {
    using Math = Flushing<HostMath>;
    Math::Deferred deferred[5];
    const Operands raw{triples[3 * i], triples[3 * i + 1], triples[3 * i + 2]};
    const float a = flushed(raw.a), b = flushed(raw.b), c = flushed(raw.c);
    const float mine[] = {Math::mul(a, b), Math::div(a, b), Math::add(a, c), Math::sub(a, c),
                          Math::fma(a, b, c)};
    const float late[] = {deferred[0].mul(a, b), deferred[1].div(a, b), deferred[2].add(a, c),
                          deferred[3].sub(a, c), deferred[4].fma(a, b, c)};
    const float kept[] = {a * b, a / b, a + c, a - c, __builtin_fmaf(a, b, c)};
    float wanted[5];
    in_mode(raw, wanted);
    for (int k = 0; k < 5; ++k) {
      num_differences += !have_same_bits(mine[k], wanted[k]);
      num_differences += !deferred[k].is_in_doubt() && !have_same_bits(late[k], wanted[k]);
      *in_doubt += deferred[k].is_in_doubt();
      *at_border += wanted[k] == 0.0f && (kept[k] == 0x1p-126f || kept[k] == -0x1p-126f);
    }
  }
  return num_differences;
#else
  (void)triples, (void)count, (void)at_border, (void)in_doubt;
  return -1;
#endif
}
}
