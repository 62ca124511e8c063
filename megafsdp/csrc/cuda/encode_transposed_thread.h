// One thread's part of an encoding whose codes are written transposed, untransposed or both: with a
// given maximum, or with the maxima of blocks along columns. transpose_thread.h has the layout.
#pragma once

#include <cstdint>

#include "transpose_thread.h"

namespace megafsdp {

constexpr uint32_t kMostBlocksDown = kTransposeRows / 16;

inline bool is_block_height(int64_t height) {
  return height >= 16 && height <= kTransposeRows && kTransposeRows % height == 0;
}

using EncodedCodes = SharedCodes<kNeighbours>;
constexpr uint32_t kEncodedCols = EncodedCodes::kCols;

// codes or transposed may be null. maximum is null for blocks: then entries has one for each block
// of rows, of a height that is_block_height(), and column.
struct EncodeTransposedTask {
  TransposeGrid grid;
  const void* values;
  uint8_t* codes;
  uint8_t* transposed;
  const int32_t* maximum;
  void* entries;
  uint32_t block_rows_log2;
  Dtype dtype;
  ScalingKind scaling;
  bool is_aligned;
  bool stores_vectors;
};

struct EncodeTransposedShared {
  EncodedCodes codes;
  uint32_t maxima[kMostBlocksDown * kEncodedCols];
  alignas(16) float factors[kMostBlocksDown * kEncodedCols];
};

template <typename Element, typename Source>
class EncodeTransposedThread {
 public:
  // Loads a thread's values and clears shared maxima. Values beyond the matrix are not written, and
  // raise no maximum of a block inside.
  MEGAFSDP_INLINE EncodeTransposedThread(const EncodeTransposedTask& task, int64_t item, int thread,
                                         EncodeTransposedShared& shared)
      : block_(transpose_block(task.grid, item, kEncodedCols)),
        thread_(static_cast<uint32_t>(thread)),
        row_(block_.row + thread_ / kThreadsAcross * kRowsOfWord),
        col_(block_.col + thread_ % kThreadsAcross * kNeighbours) {
    MEGAFSDP_ROLL
    for (uint32_t i = thread_; i < num_factors(task); i += kTransposeThreads) shared.maxima[i] = 0;
    // One branch for all rows, as in block_thread.h; below the matrix, the values of its last row.
    if (is_whole(task)) {
      MEGAFSDP_UNROLL
      for (uint32_t i = 0; i < kRowsOfWord; ++i) {
        const uint32_t row = row_ + i < task.grid.rows ? row_ + i : task.grid.rows - 1;
        const int64_t first = int64_t{row} * task.grid.cols + col_;
        values_[i] = load<NeighbourWords<Source>>(task.values, first / kNeighbours);
      }
    } else {
      MEGAFSDP_UNROLL
      for (uint32_t i = 0; i < kRowsOfWord; ++i) {
        const int count = is_there(task, i) ? static_cast<int>(task.grid.cols - col_) : 0;
        const int64_t first = int64_t{row_ + i} * task.grid.cols + col_;
        values_[i] = load_first<Source>(task.values, first, count);
      }
    }
  }

  // Raises the maxima of the thread's columns.
  MEGAFSDP_INLINE void note_maxima(const EncodeTransposedTask& task,
                                   EncodeTransposedShared& shared) const {
    if (task.maximum != nullptr) return;
    LargestOf<Source> largest;
    MEGAFSDP_UNROLL
    for (const auto& row : values_) largest.note(neighbours_of<Source>(row));
    // A warp's rows are in one block, so one lane raises the maxima for all lanes of its columns.
    static_assert(16 % (kRowsOfWord * (32 / kThreadsAcross)) == 0, "the least height of a block");
    if (!largest.template join_lanes<kThreadsAcross>()) return;
    uint32_t* const maxima = shared.maxima + first_factor(task);
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; ++k) raise_shared(maxima + k, largest.stored_of_column(k));
  }

  // Computes the factors that the block of threads shares, and writes the table's entries of
  // blocks.
  MEGAFSDP_INLINE void share_factors(const EncodeTransposedTask& task,
                                     EncodeTransposedShared& shared) const {
    MEGAFSDP_ROLL
    for (uint32_t i = thread_; i < num_factors(task); i += kTransposeThreads) {
      const bool is_given = task.maximum != nullptr;
      const uint32_t maximum = is_given
                                   ? static_cast<uint32_t>(*task.maximum)
                                   : LargestOf<Source>::widened(shared.maxima[i], task.dtype);
      const uint32_t row = block_.row + (i / kEncodedCols << task.block_rows_log2);
      const uint32_t col = block_.col + i % kEncodedCols;
      const int64_t place = int64_t{row >> task.block_rows_log2} * task.grid.cols + col;
      shared.factors[i] =
          settle_tile<Element>(task.scaling, maximum, task.entries, place,
                               !is_given && row < task.grid.rows && col < task.grid.cols);
    }
  }

  // Encodes, writes the codes untransposed, and shares them transposed.
  MEGAFSDP_INLINE void share_codes_of(const EncodeTransposedTask& task,
                                      EncodeTransposedShared& shared) const {
    Vector<uint8_t, kNeighbours> rows[kRowsOfWord];
    const auto factors = load<Neighbours<float>>(shared.factors + first_factor(task), 0);
    // The factor of a block is NaN if a value is not finite; a given maximum does not show that.
    LargestOf<float> largest_factor;
    largest_factor.note(factors);
    uint32_t largest = largest_factor.of_all(Dtype::kFloat32);
    if (task.maximum != nullptr) {
      LargestOf<Source> largest_value;
      MEGAFSDP_UNROLL
      for (const auto& row : values_) largest_value.note(neighbours_of<Source>(row));
      const uint32_t of_values = largest_value.of_all(task.dtype);
      largest = of_values > largest ? of_values : largest;
    }
    MEGAFSDP_UNROLL
    for (uint32_t i = 0; i < kRowsOfWord; ++i) {
      const Neighbours<float> values =
          read_values(neighbours_of<Source>(values_[i]), {task.dtype, Dtype::kNone});
      rows[i] = encode_bytes<Element>(values, factors, largest < kInfinityBits);
      if (task.codes != nullptr) store_row(task, i, rows[i]);
    }
    if (task.transposed != nullptr) share_codes(rows, static_cast<int>(thread_), shared.codes);
  }

  MEGAFSDP_INLINE void write(const EncodeTransposedTask& task,
                             const EncodeTransposedShared& shared) const {
    if (task.transposed == nullptr) return;
    write_transposed<1>(task.grid, block_, task.stores_vectors, static_cast<int>(thread_),
                        shared.codes, task.transposed);
  }

 private:
  MEGAFSDP_INLINE static uint32_t num_factors(const EncodeTransposedTask& task) {
    return (kTransposeRows >> task.block_rows_log2) * kEncodedCols;
  }

  // All four rows are in one block.
  MEGAFSDP_INLINE uint32_t first_factor(const EncodeTransposedTask& task) const {
    return ((row_ - block_.row) >> task.block_rows_log2) * kEncodedCols + (col_ - block_.col);
  }

  MEGAFSDP_INLINE bool is_there(const EncodeTransposedTask& task, uint32_t i) const {
    return row_ + i < task.grid.rows && col_ < task.grid.cols;
  }

  MEGAFSDP_INLINE bool is_whole(const EncodeTransposedTask& task) const {
    return task.is_aligned && col_ + kNeighbours <= task.grid.cols;
  }

  MEGAFSDP_INLINE void store_row(const EncodeTransposedTask& task, uint32_t i,
                                 const Vector<uint8_t, kNeighbours>& codes) const {
    if (!is_there(task, i)) return;
    const int64_t first = int64_t{row_ + i} * task.grid.cols + col_;
    if (is_whole(task)) {
      store(task.codes, first / kNeighbours, codes);
      return;
    }
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; ++k) {
      if (col_ + k < task.grid.cols) task.codes[first + k] = codes.at[k];
    }
  }

  TransposeBlock block_;
  uint32_t thread_, row_, col_;
  NeighbourWords<Source> values_[kRowsOfWord];
};

}  // namespace megafsdp
