// The factors of tiles whose family of scales is known at run time; for both compilers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../kernels/scales.h"

namespace megafsdp {

// Returns the factor for values before they are encoded. of_matrix, for two levels only, is the
// largest maximum of the matrix.
template <typename Element>
MEGAFSDP_INLINE float encode_factor_of(ScalingKind scaling, uint32_t maximum,
                                       const uint32_t* of_matrix) {
  float factor = 0.0f;
  visit_scaling(scaling, [&](auto family) {
    using Scaling = decltype(family);
    float matrix_factor = 0.0f;
    if constexpr (Scaling::kHasTwoLevels) matrix_factor = Scaling::matrix_factor(*of_matrix);
    factor = Scaling::template encode_factor<Element>(maximum, matrix_factor);
  });
  return factor;
}

// Returns the factor for decoded codes; of_matrix is the matrix's entry in the table.
MEGAFSDP_INLINE float decode_factor_of(ScalingKind scaling, const void* entries, int64_t tile,
                                       const float* of_matrix) {
  float factor = 0.0f;
  visit_scaling(scaling, [&](auto family) {
    using Scaling = decltype(family);
    float matrix_maximum = 0.0f;
    if constexpr (Scaling::kHasTwoLevels) matrix_maximum = *of_matrix;
    const auto* const of_tiles = static_cast<const typename Scaling::Entry*>(entries);
    factor = Scaling::decode_factor(of_tiles[tile], matrix_maximum);
  });
  return factor;
}

// Writes a tile's entry of a table. NaN gets the one pattern of tables, as a GPU's has another.
template <typename Element>
MEGAFSDP_INLINE void write_entry(ScalingKind scaling, uint32_t maximum, const uint32_t* of_matrix,
                                 void* entries, int64_t tile) {
  visit_scaling(scaling, [&](auto family) {
    using Scaling = decltype(family);
    using Entry = typename Scaling::Entry;
    float matrix_factor = 0.0f;
    if constexpr (Scaling::kHasTwoLevels) matrix_factor = Scaling::matrix_factor(*of_matrix);
    Entry entry = Scaling::template entry<Element>(maximum, matrix_factor);
    if constexpr (std::is_same_v<Entry, float>) {
      if (maximum >= kInfinityBits) entry = float_of(kNanBits);
    }
    static_cast<Entry*>(entries)[tile] = entry;
  });
}

// Returns the factor and writes the table's entry, for one level only: together, so that the
// compiler divides once for both.
template <typename Element>
MEGAFSDP_INLINE float settle_tile(ScalingKind scaling, uint32_t maximum, void* entries,
                                  int64_t tile, bool is_written) {
  float factor = 0.0f;
  visit_scaling(scaling, [&](auto family) {
    using Scaling = decltype(family);
    if constexpr (!Scaling::kHasTwoLevels) {
      using Entry = typename Scaling::Entry;
      factor = Scaling::template encode_factor<Element>(maximum, 0.0f);
      Entry entry = Scaling::template entry<Element>(maximum, 0.0f);
      if constexpr (std::is_same_v<Entry, float>) {
        if (maximum >= kInfinityBits) entry = float_of(kNanBits);
      }
      if (is_written) static_cast<Entry*>(entries)[tile] = entry;
    }
  });
  return factor;
}

}  // namespace megafsdp
