// One thread's part of a transposition of codes, or of an encoding that also transposes.
//
// A block of threads has kTransposeRows rows and eight times kWidth columns, a thread four
// neighbouring rows and kWidth neighbouring columns. A thread turns its four codes of a column into
// one word of the block's shared memory, where the words of a column lie side by side:
//
//   row, byte    0: a b c d         word of column 0: a e i m
//                1: e f g h                        1: b f j n     memory that a block shares:
//                2: i j k l                        2: c g k o     column, word: the rows 4 w to
//                3: m n o p                        3: d h l p     4 w + 3
//
// Words of different columns that are written together would lie in one bank, so the place of a
// word within its column is permuted by the thread's columns. Sixteen bytes of a column, which is a
// row of the transpose, stay together.
//
// Between the parts of a kernel all threads of its block wait for each other. The file compiles for
// the host too, where a test runs all threads through one part after another.
#pragma once

#include <cstdint>

#include "code_vectors.h"
#include "raise.h"
#include "tile_factors.h"

namespace megafsdp {

constexpr int kTransposeThreads = 256;
constexpr uint32_t kTransposeRows = 128;
constexpr uint32_t kRowsOfWord = 4;
constexpr uint32_t kWordsOfCol = kTransposeRows / kRowsOfWord;
constexpr uint32_t kThreadsAcross = kTransposeThreads / kWordsOfCol;
// Codes of a column that a thread writes at once.
constexpr uint32_t kCodesOfStore = 16;

template <int kWidth>
struct SharedCodes {
  static constexpr uint32_t kCols = kThreadsAcross * kWidth;
  alignas(16) uint32_t words[kCols * kWordsOfCol];
};

template <int kWidth>
MEGAFSDP_INLINE uint32_t place_of_word(uint32_t col, uint32_t word) {
  return col * kWordsOfCol + (word ^ col / kWidth * kRowsOfWord);
}

// Matrices of one shape, each transposed by itself, in blocks of threads.
struct TransposeGrid {
  uint32_t rows;
  uint32_t cols;
  uint32_t blocks_down;
  uint32_t blocks_across;
  int64_t num_items;
};

inline TransposeGrid transpose_grid(int64_t num_matrices, int64_t rows, int64_t cols,
                                    uint32_t block_cols) {
  const auto down = static_cast<uint32_t>((rows + kTransposeRows - 1) / kTransposeRows);
  const auto across = static_cast<uint32_t>((cols + block_cols - 1) / block_cols);
  return {static_cast<uint32_t>(rows), static_cast<uint32_t>(cols), down, across,
          num_matrices * down * across};
}

// Where a block of threads works: the first element of its matrix, its first row and column.
struct TransposeBlock {
  int64_t matrix_offset;
  uint32_t row;
  uint32_t col;
};

MEGAFSDP_INLINE TransposeBlock transpose_block(const TransposeGrid& grid, int64_t item,
                                               uint32_t block_cols) {
  const auto of_row = static_cast<uint64_t>(item) / grid.blocks_across;
  const auto across = static_cast<uint32_t>(item - of_row * grid.blocks_across);
  const auto matrix = of_row / grid.blocks_down;
  const auto down = static_cast<uint32_t>(of_row - matrix * grid.blocks_down);
  const int64_t offset = static_cast<int64_t>(matrix) * grid.rows * grid.cols;
  return {offset, down * kTransposeRows, across * block_cols};
}

// Turns the codes of four rows into words of columns.
template <int kWidth>
MEGAFSDP_INLINE void share_codes(const Vector<uint8_t, kWidth> (&rows)[kRowsOfWord], int thread,
                                 SharedCodes<kWidth>& shared) {
  const uint32_t word = thread / kThreadsAcross, first = thread % kThreadsAcross * kWidth;
  // Place of the word in the first of the thread's columns. In the next it is kWordsOfCol further:
  // words are permuted alike in all columns of a thread.
  uint32_t* const to = shared.words + place_of_word<kWidth>(first, word);
  MEGAFSDP_UNROLL
  for (int col = 0; col < kWidth; col += 4) {
    uint32_t of_rows[kRowsOfWord];
    MEGAFSDP_UNROLL
    for (uint32_t i = 0; i < kRowsOfWord; ++i) std::memcpy(&of_rows[i], rows[i].at + col, 4);
    const uint32_t low01 = pick_bytes(of_rows[0], of_rows[1], 0x5140);
    const uint32_t high01 = pick_bytes(of_rows[0], of_rows[1], 0x7362);
    const uint32_t low23 = pick_bytes(of_rows[2], of_rows[3], 0x5140);
    const uint32_t high23 = pick_bytes(of_rows[2], of_rows[3], 0x7362);
    const uint32_t transposed[4] = {
        pick_bytes(low01, low23, 0x5410), pick_bytes(low01, low23, 0x7632),
        pick_bytes(high01, high23, 0x5410), pick_bytes(high01, high23, 0x7632)};
    MEGAFSDP_UNROLL
    for (int k = 0; k < 4; ++k) {
      to[(col + k) * kWordsOfCol] = transposed[k];
    }
  }
}

// Puts codes of a column into bytes, four or eight at once.
template <int kCodesPerByte>
MEGAFSDP_INLINE Vector<uint8_t, kCodesOfStore / kCodesPerByte> packed(
    const Vector<uint8_t, kCodesOfStore>& codes) {
  Vector<uint8_t, kCodesOfStore / kCodesPerByte> bytes;
  uint32_t words[kCodesOfStore / 4];
  std::memcpy(words, &codes, sizeof words);
  if constexpr (kCodesPerByte == 2) {
    MEGAFSDP_UNROLL
    for (uint32_t k = 0; k < kCodesOfStore / 8; ++k) {
      // Each byte has a code in its low half: of each two bytes, the second code moves above the
      // first.
      const uint32_t low = words[2 * k] | words[2 * k] >> 4;
      const uint32_t high = words[2 * k + 1] | words[2 * k + 1] >> 4;
      words[k] = pick_bytes(low, high, 0x6420);
    }
  }
  std::memcpy(&bytes, words, sizeof bytes);
  return bytes;
}

// Writes the rows of the transpose from shared memory, sixteen codes at a time. is_aligned says
// that sixteen codes may be stored at once, and that sixteen divides grid.rows.
template <int kCodesPerByte, int kWidth>
MEGAFSDP_INLINE void write_transposed(const TransposeGrid& grid, const TransposeBlock& block,
                                      bool is_aligned, int thread,
                                      const SharedCodes<kWidth>& shared, uint8_t* out) {
  constexpr uint32_t kStoresOfCol = kTransposeRows / kCodesOfStore;
  constexpr uint32_t kStores = SharedCodes<kWidth>::kCols * kStoresOfCol;
  MEGAFSDP_ROLL
  for (uint32_t i = thread; i < kStores; i += kTransposeThreads) {
    const uint32_t col = i / kStoresOfCol, first = i % kStoresOfCol * kCodesOfStore;
    const uint32_t row = block.row + first;
    if (block.col + col >= grid.cols || row >= grid.rows) continue;
    const auto codes = load<Vector<uint8_t, kCodesOfStore>>(
        shared.words + place_of_word<kWidth>(col, first / kRowsOfWord), 0);
    const int64_t at = block.matrix_offset + int64_t{block.col + col} * grid.rows + row;
    const auto bytes = packed<kCodesPerByte>(codes);
    if (is_aligned) {
      store(out, at / kCodesOfStore, bytes);
      continue;
    }
    MEGAFSDP_UNROLL
    for (uint32_t k = 0; k < kCodesOfStore; k += kCodesPerByte) {
      if (row + k < grid.rows) out[(at + k) / kCodesPerByte] = bytes.at[k / kCodesPerByte];
    }
  }
}

// A transposition of codes.
struct TransposeTask {
  TransposeGrid grid;
  const uint8_t* codes;
  uint8_t* out;
  bool loads_vectors;
  bool stores_vectors;
};

constexpr int kTransposeWidth = 16;
using TransposeShared = SharedCodes<kTransposeWidth>;

template <int kCodesPerByte>
MEGAFSDP_INLINE void share_loaded(const TransposeTask& task, const TransposeBlock& block,
                                  int thread, TransposeShared& shared) {
  using Bytes = Vector<uint8_t, kTransposeWidth / kCodesPerByte>;
  constexpr int kWords = sizeof(Bytes) / sizeof(uint32_t);
  using Words = Vector<uint32_t, kWords>;
  const uint32_t row = block.row + thread / kThreadsAcross * kRowsOfWord;
  const uint32_t col = block.col + thread % kThreadsAcross * kTransposeWidth;
  Words loaded[kRowsOfWord];
  // One branch for all rows, as in block_thread.h; below the matrix, the codes of its last row,
  // which are not written.
  if (task.loads_vectors && col + kTransposeWidth <= task.grid.cols) {
    MEGAFSDP_UNROLL
    for (uint32_t i = 0; i < kRowsOfWord; ++i) {
      const uint32_t here = row + i < task.grid.rows ? row + i : task.grid.rows - 1;
      const int64_t at = block.matrix_offset + int64_t{here} * task.grid.cols + col;
      loaded[i] = load<Words>(task.codes, at / kTransposeWidth);
    }
  } else {
    MEGAFSDP_UNROLL
    for (uint32_t i = 0; i < kRowsOfWord; ++i) {
      Bytes bytes = {};
      const int64_t at = block.matrix_offset + int64_t{row + i} * task.grid.cols + col;
      MEGAFSDP_UNROLL
      for (uint32_t k = 0; k < sizeof bytes; ++k) {
        if (row + i < task.grid.rows && col + k * kCodesPerByte < task.grid.cols) {
          bytes.at[k] = task.codes[at / kCodesPerByte + k];
        }
      }
      std::memcpy(&loaded[i], &bytes, sizeof bytes);
    }
  }
  Vector<uint8_t, kTransposeWidth> rows[kRowsOfWord];
  MEGAFSDP_UNROLL
  for (uint32_t i = 0; i < kRowsOfWord; ++i) {
    uint32_t words[kTransposeWidth / 4];
    MEGAFSDP_UNROLL
    for (int k = 0; k < kWords; ++k) {
      const uint32_t word = loaded[i].at[k];
      if constexpr (kCodesPerByte == 1) {
        words[k] = word;
      } else {
        const uint32_t even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
        words[2 * k] = pick_bytes(even, odd, 0x5140);
        words[2 * k + 1] = pick_bytes(even, odd, 0x7362);
      }
    }
    std::memcpy(&rows[i], words, sizeof words);
  }
  share_codes(rows, thread, shared);
}

}  // namespace megafsdp
