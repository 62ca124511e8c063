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

// Columns of a panel at most: a multiple of the width of every tile that is narrower than a row, and
// as many as leave room for their factors in the first-level cache. Rows of most matrices are one
// panel then, and memory is read in order: jumping from row to row takes up to three times as long.
constexpr int64_t kPanelCols = 4096;
// What is read twice must stay in the second-level cache: so many elements.
constexpr int64_t kCachedNumel = 1 << 16;

struct NoRounding {};

MEGAFSDP_INLINE uint32_t any_bits_of(float value) { return bits_of(value); }
MEGAFSDP_INLINE uint32_t any_bits_of(BFloat16 value) {
  return static_cast<uint32_t>(value.bits) << 16;
}
MEGAFSDP_INLINE uint32_t any_bits_of(Float16 value) {
  return static_cast<uint32_t>(value.bits) << 16;
}

// Returns the bits of |value| as a float, rounded to another type first. A NaN may have any that are
// above infinity's.
template <typename Through, typename Source>
MEGAFSDP_INLINE uint32_t magnitude_of(Source value) {
  if constexpr (std::is_same_v<Through, BFloat16>) {
    // As FromFloat does, in fewer steps: what is above infinity stays above it.
    const uint32_t bits = bits_of(value) & kMagnitudeMask;
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    return bits > kInfinityBits ? bits : rounded;
  } else if constexpr (std::is_same_v<Through, Float16>) {
    return bits_of(to_float(FromFloat<Float16>::convert(value))) & kMagnitudeMask;
  } else {
    return bits_of(to_float(value)) & kMagnitudeMask;
  }
}

// Rows of a stack, of a fragment whose buffers begin at begin_row.
struct FragmentRows {
  TileGrid grid;
  int64_t begin_row;
  int64_t first_row;
  int64_t end_row;
};

// Part of a strip: some columns of all its rows. Where the elements of a row share a tile, so do all
// of a strip, which is cut into rows of kPanelCols instead.
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

  MEGAFSDP_INLINE int64_t num_tiles() const { return (num_cols + tile_cols - 1) / tile_cols; }
};

// Calls work(panel) on panels that cover the rows, each of so many columns at most.
template <typename Work>
MEGAFSDP_INLINE void for_each_panel(const FragmentRows& rows, int64_t panel_cols,
                                    const Work& work) {
  const TileGrid& grid = rows.grid;
  for (int64_t row = rows.first_row; row < rows.end_row;) {
    const Strip strip = strip_at(grid, row, rows.end_row);
    const int64_t offset = (row - rows.begin_row) * grid.cols;
    const int64_t run = strip.num_rows * grid.cols;
    const bool is_run = grid.is_one_across();
    const int64_t num_whole = is_run ? run / panel_cols : 0;
    if (num_whole > 0) {
      work(Panel{offset, num_whole, panel_cols, panel_cols, strip.first_tile, panel_cols,
                 strip.matrix});
    }
    // The rest of a run is one row.
    const int64_t num_rows = is_run ? 1 : strip.num_rows;
    const int64_t num_cols = is_run ? run : grid.cols;
    for (int64_t col = num_whole * panel_cols; col < num_cols; col += panel_cols) {
      const int64_t left = num_cols - col;
      const int64_t tile = is_run ? 0 : col / grid.tile_cols;
      work(Panel{offset + col, num_rows, grid.cols, left < panel_cols ? left : panel_cols,
                 strip.first_tile + tile, is_run ? panel_cols : grid.tile_cols, strip.matrix});
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
  for (int64_t i = 0; i < panel.num_cols; ++i) of_cols[i] = magnitude_of<Through>(values[i]);
  for (int64_t row = 1; row < panel.num_rows; ++row) {
    const Source* from = values + row * panel.stride;
    for (int64_t i = 0; i < panel.num_cols; ++i) {
      const uint32_t bits = magnitude_of<Through>(from[i]);
      of_cols[i] = bits > of_cols[i] ? bits : of_cols[i];
    }
  }
}

// Writes the factor of each column's tile.
MEGAFSDP_INLINE void spread(const float* of_tiles, const Panel& panel, float* of_cols) {
  if (panel.tile_cols == 1) {
    for (int64_t i = 0; i < panel.num_tiles(); ++i) of_cols[i] = of_tiles[i];
    return;
  }
  for (int64_t tile = 0; tile < panel.num_tiles(); ++tile) {
    const int64_t col = tile * panel.tile_cols, left = panel.num_cols - col;
    const int64_t count = left < panel.tile_cols ? left : panel.tile_cols;
    const float factor = of_tiles[tile];
    for (int64_t i = 0; i < count; ++i) of_cols[col + i] = factor;
  }
}

// Writes the codes of a row, each in a byte; noise is null to round to nearest. Factors are not
// negative; where they are NaN the codes are not written right.
template <typename Element, typename Through, typename Source>
MEGAFSDP_INLINE void encode_row(const Source* from, const float* noise, const float* factors,
                                int64_t num_cols, uint8_t* codes) {
  const auto finish = [&](int64_t i, uint32_t magnitude, uint32_t code)
      __attribute__((always_inline)) {
    const uint32_t signed_code = code | sign_of_code<Element>(any_bits_of(from[i]));
    codes[i] =
        static_cast<uint8_t>(magnitude >= kInfinityBits ? Element::kNanCode : signed_code);
  };
  if constexpr (std::is_same_v<Element, E2M1>) {
    if (noise != nullptr) {
      for (int64_t i = 0; i < num_cols; ++i) {
        const uint32_t magnitude = magnitude_of<Through>(from[i]);
        const uint32_t scaled = bits_of(float_of(magnitude) * factors[i]);
        const uint32_t code = E2M1::stochastic_code(scaled, noise[i]);
        // A mask in place of finish(): behind its choice the compiler leaves the conversion to an
        // integer where it cannot be vectorised.
        const uint32_t is_finite = 0u - static_cast<uint32_t>(magnitude < kInfinityBits);
        codes[i] = static_cast<uint8_t>((code | sign_of_code<E2M1>(any_bits_of(from[i]))) & is_finite);
      }
      return;
    }
  }
  for (int64_t i = 0; i < num_cols; ++i) {
    const uint32_t magnitude = magnitude_of<Through>(from[i]);
    finish(i, magnitude, encode_clamped<Element>(bits_of(float_of(magnitude) * factors[i])));
  }
}

// Writes the codes of a panel's rows.
template <typename Element, typename Through, typename Source>
MEGAFSDP_INLINE void encode_panel(const Source* values, const float* noise, const Panel& panel,
                                  const float* of_tiles, uint8_t* codes) {
  float factors[kPanelCols];
  spread(of_tiles, panel, factors);
  bool has_nan = false;
  for (int64_t i = 0; i < panel.num_tiles(); ++i) has_nan |= of_tiles[i] != of_tiles[i];
  for (int64_t row = 0; row < panel.num_rows; ++row) {
    const int64_t offset = row * panel.stride;
    uint8_t apart[kPanelCols];
    uint8_t* const to = codes + offset / Element::kCodesPerByte;
    uint8_t* const target = Element::kCodesPerByte == 1 ? to : apart;
    encode_row<Element, Through>(values + offset, noise == nullptr ? nullptr : noise + offset,
                                 factors, panel.num_cols, target);
    if (has_nan) {
      for (int64_t i = 0; i < panel.num_cols; ++i) {
        if (factors[i] != factors[i]) target[i] = static_cast<uint8_t>(Element::kNanCode);
      }
    }
    if constexpr (Element::kCodesPerByte == 2) pack(apart, to, panel.num_cols);
  }
}

// Writes the values of a panel's rows.
template <typename Element, typename Out>
MEGAFSDP_INLINE void decode_panel(const uint8_t* codes, const Panel& panel, const float* of_tiles,
                                  Out* out) {
  float factors[kPanelCols];
  spread(of_tiles, panel, factors);
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
    for_each_panel(rows, kPanelCols, [&](const Panel& panel) __attribute__((always_inline)) {
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
    float of_tiles[kPanelCols];
    for_each_panel(rows, kPanelCols, [&](const Panel& panel) __attribute__((always_inline)) {
      fill_factors(panel, of_tiles);
      encode_panel<Element, Through>(values + panel.offset,
                                     noise == nullptr ? nullptr : noise + panel.offset, panel,
                                     of_tiles, codes + panel.offset / Element::kCodesPerByte);
    });
  }

  MEGAFSDP_INLINE void fill_factors(const Panel& panel, float* of_tiles) const {
    const int32_t* const of_panel = maxima + panel.first_tile;
    const float of_matrix = of_matrices == nullptr ? 0.0f : of_matrices[panel.matrix];
    const int64_t num_tiles = panel.num_tiles();
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
    float of_tiles[kPanelCols];
    for_each_panel(rows, kPanelCols, [&](const Panel& panel) __attribute__((always_inline)) {
      fill_factors(panel, of_tiles);
      decode_panel<Element>(codes + panel.offset / Element::kCodesPerByte, panel, of_tiles,
                            out + panel.offset);
    });
  }

  MEGAFSDP_INLINE void fill_factors(const Panel& panel, float* of_tiles) const {
    const float of_matrix = of_matrices == nullptr ? 0.0f : of_matrices[panel.matrix];
    const int64_t num_tiles = panel.num_tiles();
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
    // Between tiles of one column a panel may end anywhere.
    const int64_t cached_cols = kCachedNumel / rows.grid.tile_rows;
    const int64_t panel_cols =
        rows.grid.tile_cols > 1 || cached_cols > kPanelCols ? kPanelCols : cached_cols;
    uint32_t maxima_of_panel[kPanelCols], of_tiles_in_bits[kPanelCols];
    float of_tiles[kPanelCols];
    for_each_panel(rows, panel_cols, [&](const Panel& panel) __attribute__((always_inline)) {
      maxima_of_cols<NoRounding>(values + panel.offset, panel, maxima_of_panel);
      visit_tiles_of(panel, maxima_of_panel,
                     [&](int64_t tile, uint32_t bits) __attribute__((always_inline)) {
                       of_tiles_in_bits[tile] = bits;
                     });
      fill_factors(panel, of_tiles_in_bits, of_tiles);
      encode_panel<Element, NoRounding>(values + panel.offset, nullptr, panel, of_tiles,
                                        codes + panel.offset / Element::kCodesPerByte);
    });
  }

  MEGAFSDP_INLINE void fill_factors(const Panel& panel, const uint32_t* maxima,
                                    float* of_tiles) const {
    const int64_t num_tiles = panel.num_tiles();
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
