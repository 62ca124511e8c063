// Maxima, codes and values of tiles, over rows of a stack of matrices.
//
// For every tile t and every element x of it, x rounded to another type first if asked:
//   maxima[t] = max over x of the bits of |x|
//   code(x)   = encode(x * encode_factor(maxima[t])), NaN's code if x is not finite
//   value(x)  = decode(code) * decode_factor(entry[t]), rounded once to the type of the result
// where scales.h has the factors. The naive formulas are those of quantize/tiles.py.
//
// A strip, the rows of one row of tiles, is worked on in panels of columns. A panel's maxima or
// factors are spread over its columns first, into the first-level cache; then every row is one loop
// over columns, whatever the tile's width:
//
//   factors of tiles  | a           | b           |     tile (2, 4), two tiles in a panel
//   spread            | a  a  a  a  | b  b  b  b  |
//   row 0             | x  x  x  x  | x  x  x  x  |
//   row 1             | x  x  x  x  | x  x  x  x  |
#pragma once

#include <cstdint>
#include <type_traits>

#include "float16.h"
#include "float4.h"
#include "float8.h"
#include "scales.h"
#include "simd.h"
#include "tile_grid.h"

namespace megafsdp {

// Columns of a panel: a multiple of the width of every tile that is narrower than a row.
constexpr int64_t kPanelCols = 1024;

struct NoRounding {};

template <typename Through, typename Source>
MEGAFSDP_INLINE float read_as(Source value) {
  if constexpr (std::is_same_v<Through, NoRounding>) {
    return to_float(value);
  } else {
    return to_float(FromFloat<Through>::convert(to_float(value)));
  }
}

// Rows of a stack, of a fragment whose buffers begin at begin_row.
struct FragmentRows {
  TileGrid grid;
  int64_t begin_row;
  int64_t first_row;
  int64_t end_row;
};

// Part of a strip: some columns of all its rows, or a run of its elements as one row.
struct Panel {
  // Of the first element, in elements from the first of the fragment.
  int64_t offset;
  int64_t num_rows;
  // Elements from a row to the next.
  int64_t stride;
  int64_t num_cols;
  // The first tile that the panel touches, and the width of tiles in it.
  int64_t first_tile;
  int64_t tile_cols;
  int64_t matrix;
};

// Calls work(panel) on panels that cover the rows.
template <typename Work>
MEGAFSDP_INLINE void for_each_panel(const FragmentRows& rows, const Work& work) {
  const TileGrid& grid = rows.grid;
  const bool is_run = grid.is_one_across();
  for (int64_t row = rows.first_row; row < rows.end_row;) {
    const Strip strip = strip_at(grid, row, rows.end_row);
    const int64_t offset = (row - rows.begin_row) * grid.cols;
    const int64_t num_cols = is_run ? strip.num_rows * grid.cols : grid.cols;
    for (int64_t col = 0; col < num_cols; col += kPanelCols) {
      const int64_t left = num_cols - col;
      const int64_t count = left < kPanelCols ? left : kPanelCols;
      work(Panel{offset + col, is_run ? 1 : strip.num_rows, grid.cols, count,
                 strip.first_tile + (is_run ? 0 : col / grid.tile_cols),
                 is_run ? count : grid.tile_cols, strip.matrix});
    }
    row += strip.num_rows;
  }
}

// Raises a maximum that other threads may raise too; all NaN are one pattern.
MEGAFSDP_INLINE void raise(int32_t* maximum, uint32_t bits) {
  const int32_t wanted = static_cast<int32_t>(bits > kInfinityBits ? kNanBits : bits);
  int32_t found = __atomic_load_n(maximum, __ATOMIC_RELAXED);
  while (found < wanted && !__atomic_compare_exchange_n(maximum, &found, wanted, true,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// Calls visit(tile, maximum) with the largest of every kWidth columns, or of width if kWidth is 0.
template <int64_t kWidth, typename Visit>
MEGAFSDP_INLINE void visit_tiles(const uint32_t* of_cols, int64_t num_cols, int64_t width,
                                 const Visit& visit) {
  const int64_t cols = kWidth == 0 ? width : kWidth;
  int64_t tile = 0;
  for (; (tile + 1) * cols <= num_cols; ++tile) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < cols; ++i) {
      const uint32_t bits = of_cols[tile * cols + i];
      largest = bits > largest ? bits : largest;
    }
    visit(tile, largest);
  }
  if (tile * cols < num_cols) {
    uint32_t largest = 0;
    for (int64_t i = tile * cols; i < num_cols; ++i) {
      largest = of_cols[i] > largest ? of_cols[i] : largest;
    }
    visit(tile, largest);
  }
}

template <typename Visit>
MEGAFSDP_INLINE void visit_tiles_of(const Panel& panel, const uint32_t* of_cols,
                                    const Visit& visit) {
  switch (panel.tile_cols) {
    case 16:
      return visit_tiles<16>(of_cols, panel.num_cols, 16, visit);
    case 32:
      return visit_tiles<32>(of_cols, panel.num_cols, 32, visit);
    default:
      return visit_tiles<0>(of_cols, panel.num_cols, panel.tile_cols, visit);
  }
}

// Writes the largest magnitude of each column of a panel.
template <typename Through, typename Source>
MEGAFSDP_INLINE void maxima_of_cols(const Source* values, const Panel& panel, uint32_t* of_cols) {
  for (int64_t i = 0; i < panel.num_cols; ++i) of_cols[i] = 0;
  for (int64_t row = 0; row < panel.num_rows; ++row) {
    const Source* from = values + row * panel.stride;
    for (int64_t i = 0; i < panel.num_cols; ++i) {
      const uint32_t bits = bits_of(read_as<Through>(from[i])) & kMagnitudeMask;
      of_cols[i] = bits > of_cols[i] ? bits : of_cols[i];
    }
  }
}

// Writes the factor of each column's tile.
MEGAFSDP_INLINE void spread(const float* of_tiles, const Panel& panel, float* of_cols) {
  if (panel.tile_cols == 1) {
    for (int64_t i = 0; i < panel.num_cols; ++i) of_cols[i] = of_tiles[i];
    return;
  }
  for (int64_t col = 0, tile = 0; col < panel.num_cols; col += panel.tile_cols, ++tile) {
    const int64_t left = panel.num_cols - col;
    const int64_t count = left < panel.tile_cols ? left : panel.tile_cols;
    const float factor = of_tiles[tile];
    for (int64_t i = 0; i < count; ++i) of_cols[col + i] = factor;
  }
}

MEGAFSDP_INLINE int64_t num_tiles_of(const Panel& panel) {
  return (panel.num_cols + panel.tile_cols - 1) / panel.tile_cols;
}

// Writes the codes of a panel's rows; noise is null to round to nearest.
template <typename Element, typename Through, typename Source>
MEGAFSDP_INLINE void encode_panel(const Source* values, const float* noise, const Panel& panel,
                                  const float* factors, uint8_t* codes) {
  for (int64_t row = 0; row < panel.num_rows; ++row) {
    const Source* from = values + row * panel.stride;
    uint8_t* to = codes + row * panel.stride / Element::kCodesPerByte;
    uint8_t apart[kPanelCols];
    uint8_t* const target = Element::kCodesPerByte == 1 ? to : apart;
    const auto scaled = [&](int64_t i) __attribute__((always_inline)) {
      const float value = read_as<Through>(from[i]);
      const bool is_finite = (bits_of(value) & kMagnitudeMask) < kInfinityBits;
      return is_finite ? value * factors[i] : float_of(kNanBits);
    };
    if constexpr (std::is_same_v<Element, E2M1>) {
      if (noise != nullptr) {
        const float* const of_row = noise + row * panel.stride;
        for (int64_t i = 0; i < panel.num_cols; ++i) {
          target[i] = static_cast<uint8_t>(E2M1::encode_stochastically(scaled(i), of_row[i]));
        }
        pack(apart, to, panel.num_cols);
        continue;
      }
    }
    for (int64_t i = 0; i < panel.num_cols; ++i) {
      target[i] = static_cast<uint8_t>(Element::encode(scaled(i)));
    }
    if constexpr (Element::kCodesPerByte == 2) pack(apart, to, panel.num_cols);
  }
}

// Writes the values of a panel's rows.
template <typename Element, typename Out>
MEGAFSDP_INLINE void decode_panel(const uint8_t* codes, const Panel& panel, const float* factors,
                                  Out* out) {
  for (int64_t row = 0; row < panel.num_rows; ++row) {
    const uint8_t* from = codes + row * panel.stride / Element::kCodesPerByte;
    uint8_t apart[kPanelCols];
    if constexpr (Element::kCodesPerByte == 2) {
      unpack(from, apart, panel.num_cols);
      from = apart;
    }
    Out* const to = out + row * panel.stride;
    for (int64_t i = 0; i < panel.num_cols; ++i) {
      to[i] = FromFloat<Out>::convert(Element::decode(from[i]) * factors[i]);
    }
  }
}

// Raises maxima to those of the rows.
template <typename Source, typename Through>
struct MaximaJob {
  FragmentRows rows;
  const Source* values;
  int32_t* maxima;

  MEGAFSDP_INLINE void operator()() const {
    for_each_panel(rows, [&](const Panel& panel) __attribute__((always_inline)) {
      uint32_t of_cols[kPanelCols];
      maxima_of_cols<Through>(values + panel.offset, panel, of_cols);
      visit_tiles_of(panel, of_cols,
                     [&](int64_t tile, uint32_t bits) __attribute__((always_inline)) {
                       raise(maxima + panel.first_tile + tile, bits);
                     });
    });
  }
};

// Writes the codes of the rows. of_matrices has the factor of each matrix of the stack, and is null
// where the family has none.
template <typename Element, typename Source, typename Through>
struct EncodeJob {
  FragmentRows rows;
  const Source* values;
  const float* noise;
  const int32_t* maxima;
  const float* of_matrices;
  ScalingKind scaling;
  uint8_t* codes;

  MEGAFSDP_INLINE void operator()() const {
    for_each_panel(rows, [&](const Panel& panel) __attribute__((always_inline)) {
      float of_tiles[kPanelCols], of_cols[kPanelCols];
      fill_factors(panel, of_tiles);
      spread(of_tiles, panel, of_cols);
      encode_panel<Element, Through>(values + panel.offset,
                                     noise == nullptr ? nullptr : noise + panel.offset, panel,
                                     of_cols, codes + panel.offset / Element::kCodesPerByte);
    });
  }

  MEGAFSDP_INLINE void fill_factors(const Panel& panel, float* of_tiles) const {
    const int32_t* const of_panel = maxima + panel.first_tile;
    const float of_matrix = of_matrices == nullptr ? 0.0f : of_matrices[panel.matrix];
    const int64_t num_tiles = num_tiles_of(panel);
    visit_scaling(scaling, [&](auto family) __attribute__((always_inline)) {
      using Scaling = decltype(family);
      for (int64_t i = 0; i < num_tiles; ++i) {
        const uint32_t maximum = static_cast<uint32_t>(of_panel[i]);
        of_tiles[i] = Scaling::template encode_factor<Element>(maximum, of_matrix);
      }
    });
  }
};

// Writes the values of the rows, whose codes and values begin with those of the stack. of_matrices
// has the maximum of each matrix, and is null where the family has none.
template <typename Element, typename Out>
struct DecodeJob {
  FragmentRows rows;
  const uint8_t* codes;
  const void* entries;
  const float* of_matrices;
  ScalingKind scaling;
  Out* out;

  MEGAFSDP_INLINE void operator()() const {
    for_each_panel(rows, [&](const Panel& panel) __attribute__((always_inline)) {
      float of_tiles[kPanelCols], of_cols[kPanelCols];
      fill_factors(panel, of_tiles);
      spread(of_tiles, panel, of_cols);
      decode_panel<Element>(codes + panel.offset / Element::kCodesPerByte, panel, of_cols,
                            out + panel.offset);
    });
  }

  MEGAFSDP_INLINE void fill_factors(const Panel& panel, float* of_tiles) const {
    const float of_matrix = of_matrices == nullptr ? 0.0f : of_matrices[panel.matrix];
    const int64_t num_tiles = num_tiles_of(panel);
    visit_scaling(scaling, [&](auto family) __attribute__((always_inline)) {
      using Scaling = decltype(family);
      using Entry = typename Scaling::Entry;
      const Entry* const of_panel = static_cast<const Entry*>(entries) + panel.first_tile;
      for (int64_t i = 0; i < num_tiles; ++i) {
        of_tiles[i] = Scaling::decode_factor(of_panel[i], of_matrix);
      }
    });
  }
};

// Writes the entries and the codes of the rows in one pass: each panel is read for its maxima, then
// from the cache for its codes. The rows must have all of their tiles, and the family one level.
template <typename Element, typename Source>
struct BlockJob {
  FragmentRows rows;
  const Source* values;
  void* entries;
  ScalingKind scaling;
  uint8_t* codes;

  MEGAFSDP_INLINE void operator()() const {
    for_each_panel(rows, [&](const Panel& panel) __attribute__((always_inline)) {
      uint32_t maxima_of_panel[kPanelCols], of_tiles_in_bits[kPanelCols];
      float of_tiles[kPanelCols], of_cols[kPanelCols];
      maxima_of_cols<NoRounding>(values + panel.offset, panel, maxima_of_panel);
      visit_tiles_of(panel, maxima_of_panel,
                     [&](int64_t tile, uint32_t bits) __attribute__((always_inline)) {
                       of_tiles_in_bits[tile] = bits;
                     });
      fill_factors(panel, of_tiles_in_bits, of_tiles);
      spread(of_tiles, panel, of_cols);
      encode_panel<Element, NoRounding>(values + panel.offset, nullptr, panel, of_cols,
                                        codes + panel.offset / Element::kCodesPerByte);
    });
  }

  MEGAFSDP_INLINE void fill_factors(const Panel& panel, const uint32_t* maxima,
                                    float* of_tiles) const {
    const int64_t num_tiles = num_tiles_of(panel);
    visit_scaling(scaling, [&](auto family) __attribute__((always_inline)) {
      using Scaling = decltype(family);
      using Entry = typename Scaling::Entry;
      Entry* const of_panel = static_cast<Entry*>(entries) + panel.first_tile;
      for (int64_t i = 0; i < num_tiles; ++i) {
        of_tiles[i] = Scaling::template encode_factor<Element>(maxima[i], 0.0f);
        of_panel[i] = Scaling::template entry<Element>(maxima[i], 0.0f);
      }
    });
  }
};

// Writes the entries of some tiles of one matrix.
template <typename Element>
struct EntriesJob {
  const int32_t* maxima;
  int64_t num_tiles;
  float of_matrix;
  ScalingKind scaling;
  void* entries;

  MEGAFSDP_INLINE void operator()() const {
    visit_scaling(scaling, [&](auto family) __attribute__((always_inline)) {
      using Scaling = decltype(family);
      auto* const to = static_cast<typename Scaling::Entry*>(entries);
      for (int64_t i = 0; i < num_tiles; ++i) {
        const uint32_t maximum = static_cast<uint32_t>(maxima[i]);
        to[i] = Scaling::template entry<Element>(maximum, of_matrix);
      }
    });
  }
};

// Finds the largest of some maxima.
struct LargestJob {
  const int32_t* maxima;
  int64_t num_tiles;
  uint32_t* largest;

  MEGAFSDP_INLINE void operator()() const {
    uint32_t found = 0;
    for (int64_t i = 0; i < num_tiles; ++i) {
      const uint32_t bits = static_cast<uint32_t>(maxima[i]);
      found = bits > found ? bits : found;
    }
    *largest = found;
  }
};

}  // namespace megafsdp
