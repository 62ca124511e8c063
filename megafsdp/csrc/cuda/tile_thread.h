// One thread's part of the maxima, codes and values of tiles: loads, stores, and which elements
// they are. kernels/tiles.h says what happens to an element.
//
// Eight whole neighbours in aligned buffers are moved as a vector, several rows together; others
// are moved one by one. A thread looks up its tiles once for all of its rows that share them.
//
// The file compiles for the host too, where a test runs every thread of every item in turn.
#pragma once

#include <cstdint>

#include "code_vectors.h"
#include "raise.h"
#include "tile_factors.h"
#include "tile_table.h"

namespace megafsdp {

// Rows whose vectors are in flight together.
constexpr uint32_t kRowsAhead = 4;

// Calls whole(vector, left) for every kRowsAhead rows whose vectors may be moved, with the place of
// the first vector and the number of rows left, and part(element, numel) for each other row. Only
// the last row of an aligned fragment may be short.
template <typename Whole, typename Part>
MEGAFSDP_INLINE void for_each_vector(const FragmentRow& f, const ThreadRows& rows, uint32_t row,
                                     uint32_t count, const Whole& whole, const Part& part) {
  const uint32_t last = row + (count - 1) * rows.step;
  const bool is_last_whole = neighbours_at(f, last, rows.col) == kNeighbours;
  const uint32_t num_whole = f.is_aligned ? count - (is_last_whole ? 0 : 1) : 0;
  MEGAFSDP_ROLL
  for (uint32_t i = 0; i < num_whole; i += kRowsAhead) {
    const int64_t first = int64_t{row + i * rows.step} * f.cols + rows.col;
    whole(first / kNeighbours, num_whole - i);
  }
  MEGAFSDP_ROLL
  for (uint32_t i = num_whole; i < count; ++i) {
    const uint32_t here = row + i * rows.step;
    part(int64_t{here} * f.cols + rows.col, neighbours_at(f, here, rows.col));
  }
}

// Returns the number of vectors between two of a thread's rows, in aligned fragments.
MEGAFSDP_INLINE int64_t stride_of(const FragmentRow& f, const ThreadRows& rows) {
  return int64_t{rows.step} * (f.cols / kNeighbours);
}

template <typename Source>
MEGAFSDP_INLINE void tile_maxima(const FragmentRow& f, const Reading& reading, int64_t item,
                                 int thread) {
  const ThreadRows rows = rows_of_thread(f, item, thread);
  const int64_t stride = stride_of(f, rows);
  for_each_row_of_tiles(f, rows, [&](const RowOfTiles& tiles, uint32_t row, uint32_t count) {
    uint32_t largest[kNeighbours] = {};
    const auto whole = [&](int64_t first, uint32_t left) {
      Neighbours<Source> ahead[kRowsAhead];
      MEGAFSDP_UNROLL
      for (uint32_t i = 0; i < kRowsAhead; ++i) {
        if (i < left) ahead[i] = load<Neighbours<Source>>(f.from, first + i * stride);
      }
      MEGAFSDP_UNROLL
      for (uint32_t i = 0; i < kRowsAhead; ++i) {
        if (i >= left) continue;
        const Neighbours<float> values = read_values(ahead[i], reading);
        MEGAFSDP_UNROLL
        for (int k = 0; k < kNeighbours; ++k) {
          const uint32_t bits = bits_of(values.at[k]) & kMagnitudeMask;
          largest[k] = bits > largest[k] ? bits : largest[k];
        }
      }
    };
    const auto part = [&](int64_t first, int numel) {
      MEGAFSDP_ROLL
      for (int k = 0; k < numel; ++k) {
        const Source value = static_cast<const Source*>(f.from)[first + k];
        const uint32_t bits = bits_of(read_value(value, reading)) & kMagnitudeMask;
        MEGAFSDP_UNROLL
        for (int j = 0; j < kNeighbours; ++j) {
          largest[j] = j == k && bits > largest[j] ? bits : largest[j];
        }
      }
    };
    for_each_vector(f, rows, row, count, whole, part);
    auto* const maxima = static_cast<int32_t*>(f.tiles) + tiles.first_tile;
    if (share_tile(f)) {
      uint32_t of_all = 0;
      MEGAFSDP_UNROLL
      for (uint32_t bits : largest) of_all = bits > of_all ? bits : of_all;
      raise(maxima + rows.col / f.tile_cols, of_all);
      return;
    }
    MEGAFSDP_UNROLL
    for (int k = 0; k < kNeighbours; ++k) {
      if (rows.col + k < f.cols) raise(maxima + (rows.col + k) / f.tile_cols, largest[k]);
    }
  });
}

// Returns the factors of a thread's columns in a row of tiles; find(tile) is called only once if
// all columns are in one tile.
template <typename Find>
MEGAFSDP_INLINE Neighbours<float> factors_of(const FragmentRow& f, const RowOfTiles& tiles,
                                             uint32_t col, const Find& find) {
  Neighbours<float> factors;
  const int num = share_tile(f) ? 1 : kNeighbours;
  // No indexed array in this rolled loop: a GPU would put it into memory.
  MEGAFSDP_ROLL
  for (int k = 0; k < num && col + k < f.cols; ++k) {
    const float factor = find(tiles.first_tile + (col + k) / f.tile_cols);
    MEGAFSDP_UNROLL
    for (int j = 0; j < kNeighbours; ++j) {
      factors.at[j] = num == 1 || j == k ? factor : factors.at[j];
    }
  }
  return factors;
}

template <typename Element, typename Source>
MEGAFSDP_INLINE void encode_tile(const FragmentRow& f, ScalingKind scaling, const Reading& reading,
                                 int64_t item, int thread) {
  const ThreadRows rows = rows_of_thread(f, item, thread);
  const int64_t stride = stride_of(f, rows);
  for_each_row_of_tiles(f, rows, [&](const RowOfTiles& tiles, uint32_t row, uint32_t count) {
    const auto find = [&](int64_t tile) {
      const auto maximum = static_cast<uint32_t>(static_cast<const int32_t*>(f.tiles)[tile]);
      const auto* const of_matrices = static_cast<const uint32_t*>(f.of_matrices);
      return encode_factor_of<Element>(scaling, maximum, of_matrices + tiles.matrix);
    };
    const Neighbours<float> factors = factors_of(f, tiles, rows.col, find);
    const auto whole = [&](int64_t first, uint32_t left) {
      Neighbours<Source> ahead[kRowsAhead];
      MEGAFSDP_UNROLL
      for (uint32_t i = 0; i < kRowsAhead; ++i) {
        if (i >= left) continue;
        ahead[i] = load_once<Neighbours<Source>>(f.from, first + i * stride);
      }
      MEGAFSDP_UNROLL
      for (uint32_t i = 0; i < kRowsAhead; ++i) {
        if (i >= left) continue;
        const int64_t vector = first + i * stride;
        Neighbours<float> values = read_values(ahead[i], reading);
        MEGAFSDP_UNROLL
        for (int k = 0; k < kNeighbours; ++k) values.at[k] = scaled(values.at[k], factors.at[k]);
        if constexpr (Element::kCodesPerByte == 2) {
          if (f.noise != nullptr) {
            const auto noise = load_once<Neighbours<float>>(f.noise, vector);
            store(f.to, vector, encode_values_stochastically(values, noise));
            continue;
          }
        }
        store(f.to, vector, encode_values<Element>(values));
      }
    };
    const auto part = [&](int64_t first, int numel) {
      const auto code_at = [&](int k) {
        const Source stored = static_cast<const Source*>(f.from)[first + k];
        float factor = factors.at[0];
        MEGAFSDP_UNROLL
        for (int j = 1; j < kNeighbours; ++j) factor = j == k ? factors.at[j] : factor;
        const float value = scaled(read_value(stored, reading), factor);
        if constexpr (Element::kCodesPerByte == 2) {
          if (f.noise != nullptr) return code_by_chance(value, f.noise[first + k]);
        }
        return code_of<Element>(value);
      };
      auto* const codes = static_cast<uint8_t*>(f.to) + first / Element::kCodesPerByte;
      MEGAFSDP_ROLL
      for (int k = 0; k < numel; k += Element::kCodesPerByte) {
        uint32_t byte = code_at(k);
        if constexpr (Element::kCodesPerByte == 2) byte |= code_at(k + 1) << 4;
        codes[k / Element::kCodesPerByte] = static_cast<uint8_t>(byte);
      }
    };
    for_each_vector(f, rows, row, count, whole, part);
  });
}

// Codes and values both begin with those of the fragment.
template <typename Element, typename Out>
MEGAFSDP_INLINE void decode_tile(const FragmentRow& f, ScalingKind scaling, Dtype dtype,
                                 int64_t item, int thread) {
  const ThreadRows rows = rows_of_thread(f, item, thread);
  const int64_t stride = stride_of(f, rows);
  for_each_row_of_tiles(f, rows, [&](const RowOfTiles& tiles, uint32_t row, uint32_t count) {
    const auto find = [&](int64_t tile) {
      const auto* const of_matrices = static_cast<const float*>(f.of_matrices);
      return decode_factor_of(scaling, f.tiles, tile, of_matrices + tiles.matrix);
    };
    const Neighbours<float> factors = factors_of(f, tiles, rows.col, find);
    const auto whole = [&](int64_t first, uint32_t left) {
      CodeVector<Element> ahead[kRowsAhead];
      MEGAFSDP_UNROLL
      for (uint32_t i = 0; i < kRowsAhead; ++i) {
        if (i >= left) continue;
        ahead[i] = load_once<CodeVector<Element>>(f.from, first + i * stride);
      }
      MEGAFSDP_UNROLL
      for (uint32_t i = 0; i < kRowsAhead; ++i) {
        if (i >= left) continue;
        Neighbours<float> values = decode_values<Element>(ahead[i]);
        MEGAFSDP_UNROLL
        for (int k = 0; k < kNeighbours; ++k) values.at[k] *= factors.at[k];
        store(f.to, first + i * stride, write_values<Out>(values, dtype));
      }
    };
    const auto part = [&](int64_t first, int numel) {
      MEGAFSDP_ROLL
      for (int k = 0; k < numel; ++k) {
        const int64_t at = first + k;
        uint32_t code = static_cast<const uint8_t*>(f.from)[at / Element::kCodesPerByte];
        if (Element::kCodesPerByte == 2) code = at % 2 == 0 ? code & 0xf : code >> 4;
        float factor = factors.at[0];
        MEGAFSDP_UNROLL
        for (int j = 1; j < kNeighbours; ++j) factor = j == k ? factors.at[j] : factor;
        encode(Element::decode(code) * factor, dtype, static_cast<Out*>(f.to)[at]);
      }
    };
    for_each_vector(f, rows, row, count, whole, part);
  });
}

}  // namespace megafsdp
