// Maxima, codes and values of tiles, over rows of a stack of matrices.
//
// For every tile t and every element x of it, x rounded to another type first if asked:
//   maxima[t] = max over x of the bits of |x|
//   code(x)   = encode(x * encode_factor(maxima[t])), NaN's code if x is not finite
//   value(x)  = decode(code) * decode_factor(entry[t]), rounded once to the type of the result
// where scales.h has the factors. The naive formulas are those of quantize/tiles.py.
//
// A strip, the rows of one row of tiles, is processed in panels of columns. A panel's maxima or
// factors are first spread over its columns, into the first-level cache; then every row is one loop
// over columns, whatever the tile's width:
//
//   factors of tiles  | a           | b           |     tile (2, 4), two tiles in a panel
//   spread            | a  a  a  a  | b  b  b  b  |
//   row 0             | x  x  x  x  | x  x  x  x  |
//   row 1             | x  x  x  x  | x  x  x  x  |
#pragma once

#include <cstdint>
#include <type_traits>

#include "encode_vectors.h"
#include "float16.h"
#include "float4.h"
#include "float8.h"
#include "scales.h"
#include "simd.h"
#include "stream.h"
#include "tile_grid.h"

namespace megafsdp {

// The most columns of a panel: a multiple of the width of every tile that is narrower than a row,
// with factors that fit in the first-level cache. Rows of most matrices are then one panel, and
// memory is read in order: jumping from row to row takes up to three times as long.
constexpr int64_t kPanelCols = 4096;
// Columns of a panel that is cut from a run: fewer, as one factor is spread over them.
constexpr int64_t kRunCols = 1024;
// Rows that are processed side by side: several streams read memory faster than one, and factors
// are read once for all of them. The rows are as far apart as possible, since hardware prefetches
// nearby memory in order.
constexpr int64_t kRowsAtOnce = 4;
// Elements that stay in the second-level cache until they are read again.
constexpr int64_t kCachedNumel = 1 << 16;

struct NoRounding {};

MEGAFSDP_INLINE uint32_t any_bits_of(float value) { return bits_of(value); }
MEGAFSDP_INLINE uint32_t any_bits_of(BFloat16 value) {
  return static_cast<uint32_t>(value.bits) << 16;
}
MEGAFSDP_INLINE uint32_t any_bits_of(Float16 value) {
  return static_cast<uint32_t>(value.bits) << 16;
}

// Returns the bits of |value| as a float.
template <typename Source>
MEGAFSDP_INLINE uint32_t magnitude_of(Source value) {
  return bits_of(to_float(value)) & kMagnitudeMask;
}

// Returns a magnitude rounded to another type; one that is not finite becomes any bits from
// infinity's on.
template <typename Through>
MEGAFSDP_INLINE uint32_t round_magnitude(uint32_t bits) {
  if constexpr (std::is_same_v<Through, BFloat16>) {
    // Like FromFloat, in fewer steps.
    return (bits + ((bits & 0x10000) == 0 ? 0x7fff : 0x8000)) & 0xffff0000;
  } else if constexpr (std::is_same_v<Through, Float16>) {
    return bits_of(to_float(FromFloat<Float16>::convert(float_of(bits))));
  } else {
    return bits;
  }
}

// Like round_magnitude(), but NaN keep bits above infinity's.
template <typename Through>
MEGAFSDP_INLINE uint32_t round_with_nan(uint32_t bits) {
  return bits > kInfinityBits ? bits : round_magnitude<Through>(bits);
}

// Rows of a stack, in a fragment whose buffers begin at begin_row.
struct FragmentRows {
  TileGrid grid;
  int64_t begin_row;
  int64_t first_row;
  int64_t end_row;
};

// Part of a strip: some columns of all its rows. If the elements of a row share a tile, all
// elements of the strip do: it is a run, and is cut into rows of kRunCols instead.
struct Panel {
  // Offset of the first element, in elements from the first of the fragment.
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

// Calls work(panel) on panels that cover the rows, each of panel_cols columns at most.
template <typename Work>
MEGAFSDP_INLINE void for_each_panel(const FragmentRows& rows, int64_t panel_cols,
                                    const Work& work) {
  const TileGrid& grid = rows.grid;
  for (int64_t row = rows.first_row; row < rows.end_row;) {
    const Strip strip = strip_at(grid, row, rows.end_row);
    const int64_t offset = (row - rows.begin_row) * grid.cols;
    const int64_t run = strip.num_rows * grid.cols;
    const bool is_run = grid.is_one_across();
    const int64_t num_whole = is_run ? run / kRunCols : 0;
    if (num_whole > 0) {
      work(Panel{offset, num_whole, kRunCols, kRunCols, strip.first_tile, kRunCols, strip.matrix});
    }
    // The rest of a run is one row.
    const int64_t num_rows = is_run ? 1 : strip.num_rows;
    const int64_t num_cols = is_run ? run : grid.cols;
    const int64_t width = is_run ? kRunCols : panel_cols;
    for (int64_t col = num_whole * kRunCols; col < num_cols; col += width) {
      const int64_t left = num_cols - col;
      const int64_t tile = is_run ? 0 : col / grid.tile_cols;
      work(Panel{offset + col, num_rows, grid.cols, left < width ? left : width,
                 strip.first_tile + tile, is_run ? kRunCols : grid.tile_cols, strip.matrix});
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
template <typename Source>
MEGAFSDP_INLINE void maxima_of_cols(const Source* values, const Panel& panel, uint32_t* of_cols) {
  const auto larger = [](uint32_t a, uint32_t b) __attribute__((always_inline)) {
    return a > b ? a : b;
  };
  for (int64_t i = 0; i < panel.num_cols; ++i) of_cols[i] = 0;
  const int64_t num_groups = panel.num_rows / kRowsAtOnce;
  for (int64_t group = 0; group < num_groups; ++group) {
    const Source* from[kRowsAtOnce];
    for (int64_t k = 0; k < kRowsAtOnce; ++k) {
      from[k] = values + (group + k * num_groups) * panel.stride;
    }
    for (int64_t i = 0; i < panel.num_cols; ++i) {
      const uint32_t first = larger(magnitude_of(from[0][i]), magnitude_of(from[1][i]));
      const uint32_t last = larger(magnitude_of(from[2][i]), magnitude_of(from[3][i]));
      of_cols[i] = larger(of_cols[i], larger(first, last));
    }
  }
  for (int64_t row = num_groups * kRowsAtOnce; row < panel.num_rows; ++row) {
    const Source* const from = values + row * panel.stride;
    for (int64_t i = 0; i < panel.num_cols; ++i) {
      of_cols[i] = larger(of_cols[i], magnitude_of(from[i]));
    }
  }
}

// Writes the factor of each column's tile, tiles being kWidth wide, or width if kWidth is 0.
template <int64_t kWidth>
MEGAFSDP_INLINE void spread_tiles(const float* of_tiles, int64_t num_cols, int64_t width,
                                  float* of_cols) {
  const int64_t cols = kWidth == 0 ? width : kWidth;
  int64_t tile = 0;
  for (; (tile + 1) * cols <= num_cols; ++tile) {
    for (int64_t i = 0; i < cols; ++i) of_cols[tile * cols + i] = of_tiles[tile];
  }
  for (int64_t i = tile * cols; i < num_cols; ++i) of_cols[i] = of_tiles[tile];
}

MEGAFSDP_INLINE void spread(const float* of_tiles, const Panel& panel, float* of_cols) {
  switch (panel.tile_cols) {
    case 1:
      return spread_tiles<1>(of_tiles, panel.num_cols, 1, of_cols);
    case 16:
      return spread_tiles<16>(of_tiles, panel.num_cols, 16, of_cols);
    case 32:
      return spread_tiles<32>(of_tiles, panel.num_cols, 32, of_cols);
    default:
      return spread_tiles<0>(of_tiles, panel.num_cols, panel.tile_cols, of_cols);
  }
}

// Whether a value of this magnitude, once scaled, gets the code of NaN: it is not finite, or its
// factor is NaN. A "||" of two comparisons would keep loops from being vectorised.
MEGAFSDP_INLINE bool gives_nan(uint32_t magnitude, uint32_t scaled) {
  const uint32_t of_value = magnitude >= kInfinityBits, of_factor = scaled > kInfinityBits;
  return (of_value | of_factor) != 0;
}

// Calls encode(i, scaled magnitude, bits with the value's sign, whether it gives NaN) for each
// value of a row; values may be unusual.
template <typename Through, typename Source, typename Encode>
MEGAFSDP_INLINE void for_each_scaled(const Source* from, const float* factors, int64_t num_cols,
                                     const Encode& encode) {
  MEGAFSDP_INDEPENDENT
  for (int64_t i = 0; i < num_cols; ++i) {
    const uint32_t magnitude = round_magnitude<Through>(magnitude_of(from[i]));
    const uint32_t scaled = bits_of(float_of(magnitude) * factors[i]);
    encode(i, scaled, any_bits_of(from[i]), gives_nan(magnitude, scaled));
  }
}

// Writes the codes of a row, each in a byte; values may be unusual. Rounds by noise unless it is
// null.
template <typename Element, typename Through, typename Source>
MEGAFSDP_INLINE void encode_row(const Source* from, const float* noise, const float* factors,
                                int64_t num_cols, uint8_t* codes) {
  if constexpr (Element::kCodesPerByte == 2) {
    if (noise != nullptr) {
      return for_each_scaled<Through>(
          from, factors, num_cols,
          [&](int64_t i, uint32_t scaled, uint32_t sign, bool is_nan) __attribute__((always_inline)) {
            codes[i] = static_cast<uint8_t>(
                Element::encode_parts_stochastically(scaled, sign, noise[i], is_nan));
          });
    }
  }
  for_each_scaled<Through>(
      from, factors, num_cols,
      [&](int64_t i, uint32_t scaled, uint32_t sign, bool is_nan) __attribute__((always_inline)) {
        codes[i] = static_cast<uint8_t>(encode_parts<Element>(scaled, sign, is_nan));
      });
}

// How codes are written.
struct EncodeMode {
  Simd level;
  // Whether codes are stored past the caches where possible.
  bool streams;
};

// Writes the codes of some rows, given the factors of their columns.
template <int64_t kRows, typename Element, typename Through, typename Source>
MEGAFSDP_INLINE void encode_group(const Source* values, const float* noise, const Panel& panel,
                                  const float* factors, uint8_t* codes, EncodeMode mode) {
  constexpr bool is_packed = Element::kCodesPerByte == 2;
  uint8_t apart[is_packed ? kRunCols : 1];
  for (int64_t col = 0; col < panel.num_cols; col += kRunCols) {
    const int64_t end = panel.num_cols - col < kRunCols ? panel.num_cols : col + kRunCols;
    const int64_t whole = noise == nullptr ? (end - col) / kVectorCols * kVectorCols : 0;
    const bool is_done =
        encode_vectors<kRows, Element, Through>(mode.level, values + col, panel.stride,
                                                factors + col, whole,
                                                codes + col / Element::kCodesPerByte, mode.streams);
    const int64_t first = is_done ? col + whole : col, num_cols = end - first;
    if (num_cols == 0) continue;
    // Streamed codes must not land after the codes that are written again here.
    if (mode.streams && !is_done) fence_streams();
    for (int64_t row = 0; row < kRows; ++row) {
      const int64_t offset = row * panel.stride + first;
      uint8_t* const to = codes + offset / Element::kCodesPerByte;
      encode_row<Element, Through>(values + offset, noise == nullptr ? nullptr : noise + offset,
                                   factors + first, num_cols, is_packed ? apart : to);
      if constexpr (is_packed) pack(apart, to, num_cols);
    }
  }
}

// Writes the codes of a panel's rows.
template <typename Element, typename Through, typename Source>
MEGAFSDP_INLINE void encode_panel(const Source* values, const float* noise, const Panel& panel,
                                  const float* of_tiles, uint8_t* codes, EncodeMode mode) {
  float factors[kPanelCols];
  spread(of_tiles, panel, factors);
  const auto group = [&](auto rows, const Panel& of, int64_t row) __attribute__((always_inline)) {
    const int64_t offset = row * panel.stride;
    encode_group<decltype(rows)::value, Element, Through>(
        values + offset, noise == nullptr ? nullptr : noise + offset, of, factors,
        codes + offset / Element::kCodesPerByte, mode);
  };
  const int64_t num_groups = panel.num_rows / kRowsAtOnce;
  Panel apart = panel;
  apart.stride *= num_groups;
  for (int64_t row = 0; row < num_groups; ++row) {
    group(std::integral_constant<int64_t, kRowsAtOnce>{}, apart, row);
  }
  for (int64_t row = num_groups * kRowsAtOnce; row < panel.num_rows; ++row) {
    group(std::integral_constant<int64_t, 1>{}, panel, row);
  }
}

// Rounds a product of a code and a factor. NaN products have no bits in their low halves, so the
// addition that rounds leaves them NaN.
template <typename Out>
MEGAFSDP_INLINE Out round_product(float value) {
  if constexpr (std::is_same_v<Out, BFloat16>) {
    const uint32_t bits = bits_of(value);
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  } else {
    return FromFloat<Out>::convert(value);
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
      to[i] = round_product<Out>(Element::decode(from[i]) * factors[i]);
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
      maxima_of_cols(values + panel.offset, panel, of_cols);
      visit_tiles_of(panel, of_cols,
                     [&](int64_t tile, uint32_t bits) __attribute__((always_inline)) {
                       raise(maxima + panel.first_tile + tile,
                             round_with_nan<Through>(bits));
                     });
    });
  }
};

// Writes the factors that values of some tiles are multiplied with before they are encoded.
template <typename Element>
struct EncodeFactorsJob {
  const int32_t* maxima;
  int64_t num_tiles;
  float of_matrix;
  ScalingKind scaling;
  float* factors;

  MEGAFSDP_INLINE void operator()() const {
    visit_scaling(scaling, [&](auto family) __attribute__((always_inline)) {
      using Scaling = decltype(family);
      for (int64_t i = 0; i < num_tiles; ++i) {
        const uint32_t maximum = static_cast<uint32_t>(maxima[i]);
        factors[i] = Scaling::template encode_factor<Element>(maximum, of_matrix);
      }
    });
  }
};

// Writes the factors that decoded codes of some tiles are multiplied with; NaN has the pattern
// without bits in its low half.
struct DecodeFactorsJob {
  const void* entries;
  int64_t first_tile;
  int64_t num_tiles;
  float of_matrix;
  ScalingKind scaling;
  float* factors;

  MEGAFSDP_INLINE void operator()() const {
    visit_scaling(scaling, [&](auto family) __attribute__((always_inline)) {
      using Scaling = decltype(family);
      const auto* of_tiles = static_cast<const typename Scaling::Entry*>(entries) + first_tile;
      for (int64_t i = 0; i < num_tiles; ++i) {
        const float factor = Scaling::decode_factor(of_tiles[i], of_matrix);
        factors[i] = factor == factor ? factor : float_of(kNanBits);
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

// Writes the codes of the rows. of_matrices has the factor of each matrix of the stack, and is null
// if the family has none. Factors are computed by calls: inlining the loops of all families into
// each of these functions would take longer to compile than everything else.
template <typename Element, typename Source, typename Through>
struct EncodeJob {
  FragmentRows rows;
  const Source* values;
  const float* noise;
  const int32_t* maxima;
  const float* of_matrices;
  ScalingKind scaling;
  uint8_t* codes;
  EncodeMode mode;

  MEGAFSDP_INLINE void operator()() const {
    float of_tiles[kPanelCols];
    for_each_panel(rows, kPanelCols, [&](const Panel& panel) __attribute__((always_inline)) {
      const float of_matrix = of_matrices == nullptr ? 0.0f : of_matrices[panel.matrix];
      run_at(mode.level, EncodeFactorsJob<Element>{maxima + panel.first_tile, panel.num_tiles(),
                                                   of_matrix, scaling, of_tiles});
      encode_panel<Element, Through>(values + panel.offset,
                                     noise == nullptr ? nullptr : noise + panel.offset, panel,
                                     of_tiles, codes + panel.offset / Element::kCodesPerByte,
                                     mode);
    });
    if (mode.streams) fence_streams();
  }
};

// Writes the values of the rows; the buffers of codes and values begin at the stack's first row.
// of_matrices has the maximum of each matrix, and is null if the family has none.
template <typename Element, typename Out>
struct DecodeJob {
  FragmentRows rows;
  const uint8_t* codes;
  const void* entries;
  const float* of_matrices;
  ScalingKind scaling;
  Out* out;
  Simd level;

  MEGAFSDP_INLINE void operator()() const {
    float of_tiles[kPanelCols];
    for_each_panel(rows, kPanelCols, [&](const Panel& panel) __attribute__((always_inline)) {
      const float of_matrix = of_matrices == nullptr ? 0.0f : of_matrices[panel.matrix];
      run_at(level, DecodeFactorsJob{entries, panel.first_tile, panel.num_tiles(), of_matrix,
                                     scaling, of_tiles});
      decode_panel<Element>(codes + panel.offset / Element::kCodesPerByte, panel, of_tiles,
                            out + panel.offset);
    });
  }
};

// Writes the entries and the codes of the rows in one pass: each panel is read for its maxima, then
// from the cache for its codes. The rows must have all of their tiles, and the family one level.
template <typename Element, typename Source>
struct BlockJob {
  FragmentRows rows;
  const Source* values;
  uint8_t* entries;
  int64_t entry_nbytes;
  ScalingKind scaling;
  uint8_t* codes;
  Simd level;

  MEGAFSDP_INLINE void operator()() const {
    // If tiles are one column wide, a panel may end anywhere.
    const int64_t cached_cols = kCachedNumel / rows.grid.tile_rows;
    const int64_t panel_cols =
        rows.grid.tile_cols > 1 || cached_cols > kPanelCols ? kPanelCols : cached_cols;
    uint32_t of_cols[kPanelCols];
    int32_t maxima[kPanelCols];
    float of_tiles[kPanelCols];
    for_each_panel(rows, panel_cols, [&](const Panel& panel) __attribute__((always_inline)) {
      maxima_of_cols(values + panel.offset, panel, of_cols);
      visit_tiles_of(panel, of_cols,
                     [&](int64_t tile, uint32_t bits) __attribute__((always_inline)) {
                       maxima[tile] = static_cast<int32_t>(bits);
                     });
      const int64_t num_tiles = panel.num_tiles();
      run_at(level, EncodeFactorsJob<Element>{maxima, num_tiles, 0.0f, scaling, of_tiles});
      run_at(level, EntriesJob<Element>{maxima, num_tiles, 0.0f, scaling,
                                        entries + panel.first_tile * entry_nbytes});
      encode_panel<Element, NoRounding>(values + panel.offset, nullptr, panel, of_tiles,
                                        codes + panel.offset / Element::kCodesPerByte,
                                        {level, false});
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
