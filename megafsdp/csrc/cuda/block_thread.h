// One thread's part of scales and codes of blocks along rows, in one pass: a thread loads eight
// neighbours of some rows, lanes of a warp compare their maxima, one lane of a block computes the
// factor of a row, another lane that of the next row, and each thread encodes its values.
//
//   block of 32, values of a row   0 .. 7   8 .. 15   16 .. 23   24 .. 31
//   lane                              0        1         2          3
//
// The file compiles for the host too, where a test does the exchanges between lanes.
#pragma once

#include <cstdint>

#include "code_vectors.h"
#include "tile_factors.h"
#include "tile_table.h"

namespace megafsdp {

constexpr int kBlockRows = 4;
constexpr int kWarpLanes = 32;

// A matrix of whole blocks, except the last of each row.
struct BlockTask {
  const void* values;
  uint8_t* codes;
  void* entries;
  uint32_t rows;
  uint32_t cols;
  uint32_t blocks_across;
  // Lanes of a block: a power of two, at most a warp.
  uint32_t lanes;
  uint32_t lanes_log2;
  // Threads side by side (whole blocks of lanes), and the number of such panels.
  uint32_t panel;
  uint32_t num_panels;
  Dtype dtype;
  ScalingKind scaling;
  bool is_aligned;
};

inline bool is_block_width(int64_t width) {
  const int64_t lanes = width / kNeighbours;
  return width % kNeighbours == 0 && lanes > 0 && lanes <= kWarpLanes && (lanes & (lanes - 1)) == 0;
}

// Lays out a matrix for blocks of a width that is_block_width().
inline BlockTask laid_out_in_blocks(const TileGrid& grid, const void* values, uint8_t* codes,
                                    void* entries) {
  BlockTask task{};
  task.values = values;
  task.codes = codes;
  task.entries = entries;
  task.rows = static_cast<uint32_t>(grid.num_matrices * grid.rows);
  task.cols = static_cast<uint32_t>(grid.cols);
  task.blocks_across = static_cast<uint32_t>(grid.tiles_across());
  task.lanes = static_cast<uint32_t>(grid.tile_cols / kNeighbours);
  while ((1u << task.lanes_log2) < task.lanes) ++task.lanes_log2;
  const uint32_t vectors = task.blocks_across * task.lanes;
  task.num_panels = (vectors + kTileThreads - 1) / kTileThreads;
  const uint32_t panel = (vectors + task.num_panels - 1) / task.num_panels;
  task.panel = (panel + task.lanes - 1) / task.lanes * task.lanes;
  return task;
}

inline int64_t num_items_of(const BlockTask& task) {
  const int64_t rows_of_item = int64_t{kBlockRows} * (kTileThreads / task.panel);
  return (task.rows + rows_of_item - 1) / rows_of_item * task.num_panels;
}

// The largest magnitude in each of a thread's rows, of its own values or of its block's.
template <typename Source>
struct BlockMaxima {
  using Largest = LargestOf<Source>;
  static constexpr uint32_t kWords = kBlockRows / Largest::kOfWord;

  MEGAFSDP_INLINE void raise(uint32_t word, uint32_t others) {
    words[word] = Largest::larger(words[word], others);
  }

  // Returns a row's maximum as the bits of a float; zero for a row that does not exist.
  MEGAFSDP_INLINE uint32_t of_row(uint32_t row, Dtype dtype) const {
    uint32_t word = 0;
    MEGAFSDP_UNROLL
    for (uint32_t i = 0; i < kWords; ++i) {
      // A mask: for a choice between words the compiler would index an array in memory.
      word |= words[i] & (0u - static_cast<uint32_t>(row / Largest::kOfWord == i));
    }
    return Largest::widened(Largest::taken(word, row), dtype);
  }

  uint32_t words[kWords];
};

template <typename Element, typename Source>
class BlockThread {
 public:
  using Largest = LargestOf<Source>;

  // Loads a thread's values. Beyond the matrix they are zero or those of its last row; nothing is
  // written for these.
  MEGAFSDP_INLINE BlockThread(const BlockTask& task, int64_t item, int thread) {
    const auto number = static_cast<uint32_t>(thread);
    step_ = kTileThreads / task.panel;
    const auto group = static_cast<uint32_t>(item / task.num_panels);
    const auto panel = static_cast<uint32_t>(item - int64_t{group} * task.num_panels);
    const uint32_t lane = number / task.panel;
    const uint32_t vector = panel * task.panel + number - lane * task.panel;
    row_ = group * kBlockRows * step_ + lane;
    col_ = vector * kNeighbours;
    is_there_ = lane < step_ && vector < (task.blocks_across << task.lanes_log2);
    // One branch for all rows, so that their loads are in flight together: with a branch for each,
    // a load would be waited for before the next one begins.
    if (is_there_ && is_whole(task)) {
      MEGAFSDP_UNROLL
      for (int i = 0; i < kBlockRows; ++i) {
        const uint32_t row = row_ + i * step_;
        // Below the matrix, the values of its last row.
        const int64_t first = int64_t{row < task.rows ? row : task.rows - 1} * task.cols + col_;
        values_[i] = load<NeighbourWords<Source>>(task.values, first / kNeighbours);
      }
    } else {
      MEGAFSDP_UNROLL
      for (int i = 0; i < kBlockRows; ++i) {
        const uint32_t row = row_ + i * step_;
        const bool is_row_there = is_there_ && row < task.rows;
        const int count = is_row_there ? static_cast<int>(task.cols - col_) : 0;
        values_[i] = load_first<Source>(task.values, int64_t{row} * task.cols + col_, count);
      }
    }
  }

  // Returns words of the rows' largest magnitudes, in the stored form.
  MEGAFSDP_INLINE BlockMaxima<Source> maxima() const {
    BlockMaxima<Source> maxima = {};
    MEGAFSDP_UNROLL
    for (uint32_t i = 0; i < kBlockRows; ++i) {
      LargestOf<Source> largest;
      largest.note(neighbours_of<Source>(values_[i]));
      maxima.words[i / Largest::kOfWord] |= Largest::placed(largest.stored(), i);
    }
    return maxima;
  }

  // Returns the factor of the thread's block in one of the rows, from the block's maximum, and
  // writes the block's entry of the table. Called by any one lane of the block.
  MEGAFSDP_INLINE float settle(const BlockTask& task, int i, uint32_t maximum) const {
    const uint32_t row = row_ + i * step_;
    const uint32_t block = col_ / kNeighbours >> task.lanes_log2;
    const int64_t place = int64_t{row} * task.blocks_across + block;
    return settle_tile<Element>(task.scaling, maximum, task.entries, place,
                                is_there_ && row < task.rows);
  }

  // Writes the codes of one of the rows, given the factor of its block, which is NaN if a value of
  // the block is not finite.
  MEGAFSDP_INLINE void finish(const BlockTask& task, int i, float factor) const {
    const uint32_t row = row_ + i * step_;
    if (!is_there_ || row >= task.rows) return;
    const Neighbours<float> values =
        read_values(neighbours_of<Source>(values_[i]), {task.dtype, Dtype::kNone});
    Neighbours<float> factors;
    MEGAFSDP_UNROLL
    for (float& each : factors.at) each = factor;
    const CodeVector<Element> codes = encode_bytes<Element>(values, factors, factor == factor);
    const int64_t first = int64_t{row} * task.cols + col_;
    if (is_whole(task)) {
      store(task.codes, first / kNeighbours, codes);
      return;
    }
    MEGAFSDP_UNROLL
    for (int k = 0; k < kCodeBytes<Element>; ++k) {
      const uint32_t col = col_ + k * Element::kCodesPerByte;
      if (col < task.cols) task.codes[first / Element::kCodesPerByte + k] = codes.at[k];
    }
  }

 private:
  MEGAFSDP_INLINE bool is_whole(const BlockTask& task) const {
    return task.is_aligned && col_ + kNeighbours <= task.cols;
  }

  NeighbourWords<Source> values_[kBlockRows];
  uint32_t row_, step_, col_;
  bool is_there_;
};

}  // namespace megafsdp
