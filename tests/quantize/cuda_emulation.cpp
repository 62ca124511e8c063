// The CUDA kernels of quantized weights and inputs with their threads in turn on the host: a kernel
// whose threads wait for each other, one part after another. A test compiles this; nothing of the
// package does.
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../megafsdp/csrc/cuda/quantize_arguments.h"
#include "../../megafsdp/csrc/cuda/quantize_plan.h"

namespace {

using namespace megafsdp;

std::string last_error;
bool was_aligned = false;

// Calls work(item, thread) for all threads of all blocks.
template <typename Work>
void for_threads(int64_t num_blocks, int num_threads, const Work& work) {
  for (int64_t item = 0; item < num_blocks; ++item) {
    for (int thread = 0; thread < num_threads; ++thread) work(item, thread);
  }
}

// Calls work(row, item, thread) on tables of rows; returns how many tables there were.
template <typename Table, int kMost, typename MakeRow, typename Work>
int64_t run_tables(int64_t num_rows, int num_threads, const MakeRow& make_row, const Work& work) {
  int64_t num_tables = 0;
  for_each_table<Table, kMost>(num_rows, make_row, [&](const Table& table) {
    num_tables += table.num_items > 0;
    for_threads(table.num_items, num_threads,
                [&](int64_t item, int thread) { work(row_of_item(table, item), item, thread); });
    return 0;
  });
  return num_tables;
}

template <typename Stack>
void run_largest(const std::vector<Stack>& stacks, uint32_t* largest) {
  const auto make_row = [&](int64_t i) {
    const ScaleTable table{stacks[i].grid, stacks[i].maxima, nullptr, nullptr, nullptr, 0};
    uint32_t* const own = largest;
    largest += stacks[i].grid.num_matrices;
    return laid_out(table, own);
  };
  run_tables<TableOfTables, kMostTables>(static_cast<int64_t>(stacks.size()), kTableThreads,
                                         make_row, raise_largest);
}

// Runs a call, whose arguments may be wrong; returns what it returns, or -1.
template <typename Call>
int64_t guarded(const Call& call) {
  try {
    return call();
  } catch (const std::logic_error& error) {
    last_error = error.what();
    return -1;
  }
}

struct CodingNames {
  const char* element;
  const char* scaling;
  int64_t tile_rows;
  int64_t tile_cols;
};

TileCodingArguments coding_of(const CodingNames& names) {
  return {names.element, names.scaling, names.tile_rows, names.tile_cols};
}

// Numbers in the order of the bindings' tuples.
BufferArguments buffer_at(const int64_t* numbers) {
  return {static_cast<uintptr_t>(numbers[0]), numbers[1]};
}

StackShape shape_at(const int64_t* numbers) { return {numbers[0], numbers[1], numbers[2]}; }

TileArguments tile_arguments(const CodingNames& names, const char* dtype, const char* through,
                             int64_t num_fragments, const int64_t* numbers, const int64_t* noise) {
  TileArguments arguments{coding_of(names), {}, dtype, through, {0, 0}};
  if (noise != nullptr) arguments.noise = buffer_at(noise);
  for (int64_t i = 0; i < num_fragments; ++i, numbers += 10) {
    arguments.fragments.push_back({buffer_at(numbers), numbers[2], shape_at(numbers + 3),
                                   buffer_at(numbers + 6), buffer_at(numbers + 8)});
  }
  return arguments;
}

}  // namespace

extern "C" {

const char* emulated_error() { return last_error.c_str(); }

// Whether the last call moved vectors.
bool emulated_was_aligned() { return was_aligned; }

bool emulate_is_one_pass(const CodingNames* names) { return is_one_pass(coding_of(*names)); }

int64_t emulate_maxima(const CodingNames* names, const char* dtype, const char* through,
                       int64_t num_fragments, const int64_t* numbers) {
  return guarded([&] {
    const auto arguments = tile_arguments(*names, dtype, through, num_fragments, numbers, nullptr);
    const std::vector<TileFragment> fragments = checked_fragments(arguments, false);
    const Reading reading{dtype_of(dtype), dtype_of(through)};
    int64_t num_tables = 0;
    was_aligned = true;
    visit_stored(reading.dtype, [&](auto source) {
      num_tables = run_tables<FragmentTable, kMostFragments>(
          static_cast<int64_t>(fragments.size()), kTileThreads,
          [&](int64_t i) { return row_of_values(fragments[i], reading); },
          [&](const FragmentRow& row, int64_t item, int thread) {
            was_aligned &= row.is_aligned;
            tile_maxima<decltype(source)>(row, reading, item, thread);
          });
    });
    return num_tables;
  });
}

int64_t emulate_encode(const CodingNames* names, const char* dtype, const char* through,
                       int64_t num_fragments, const int64_t* numbers, const int64_t* noise,
                       uint32_t* largest) {
  return guarded([&] {
    const auto arguments = tile_arguments(*names, dtype, through, num_fragments, numbers, noise);
    const std::vector<TileFragment> fragments = checked_fragments(arguments, true);
    const CudaTileLaunch launch{fragments.data(),
                                static_cast<int64_t>(fragments.size()),
                                element_of(names->element),
                                scaling_of(names->scaling),
                                dtype_of(dtype),
                                dtype_of(through),
                                reinterpret_cast<const float*>(noise[0]),
                                largest,
                                {0, nullptr}};
    const bool has_two_levels = launch.scaling == ScalingKind::kTwoLevel;
    if (has_two_levels) run_largest(fragments, largest);
    const uint32_t* own = largest;
    const auto make_row = [&](int64_t i) {
      const FragmentRow row = row_of_codes(fragments[i], launch, own);
      if (has_two_levels) own += fragments[i].grid.num_matrices;
      return row;
    };
    const Reading reading{launch.dtype, launch.through};
    int64_t num_tables = 0;
    was_aligned = true;
    visit_element(launch.element, [&](auto element) {
      visit_stored(launch.dtype, [&](auto source) {
        num_tables = run_tables<FragmentTable, kMostFragments>(
            launch.num_fragments, kTileThreads, make_row,
            [&](const FragmentRow& row, int64_t item, int thread) {
              was_aligned &= row.is_aligned;
              encode_tile<decltype(element), decltype(source)>(row, launch.scaling, reading, item,
                                                               thread);
            });
      });
    });
    return num_tables;
  });
}

// numbers has shape, maxima and table of each.
int64_t emulate_fill(const CodingNames* names, int64_t num_tables, const int64_t* numbers,
                     uint32_t* largest) {
  return guarded([&] {
    std::vector<TableArguments> arguments;
    for (int64_t i = 0; i < num_tables; ++i, numbers += 7) {
      arguments.push_back({shape_at(numbers), buffer_at(numbers + 3), buffer_at(numbers + 5)});
    }
    const std::vector<ScaleTable> tables = checked_tables(coding_of(*names), arguments);
    const ScalingKind scaling = scaling_of(names->scaling);
    const bool has_two_levels = scaling == ScalingKind::kTwoLevel;
    if (has_two_levels) run_largest(tables, largest);
    const auto make_row = [&](int64_t i) {
      uint32_t* const own = has_two_levels ? largest : nullptr;
      if (has_two_levels) largest += tables[i].grid.num_matrices;
      return laid_out(tables[i], own);
    };
    int64_t num_launches = 0;
    visit_element(element_of(names->element), [&](auto element) {
      num_launches = run_tables<TableOfTables, kMostTables>(
          num_tables, kTableThreads, make_row, [&](const TableRow& row, int64_t item, int thread) {
            fill_places<decltype(element)>(row, scaling, item, thread);
          });
    });
    return num_launches;
  });
}

// numbers has shape, codes, table and out.
int64_t emulate_decode(const CodingNames* names, const int64_t* numbers, const char* dtype) {
  return guarded([&]() -> int64_t {
    const DecodeArguments arguments{coding_of(*names),      shape_at(numbers),
                                    buffer_at(numbers + 3), buffer_at(numbers + 5),
                                    buffer_at(numbers + 7), dtype};
    const CudaDecodeLaunch launch{checked_decode(arguments),
                                  reinterpret_cast<const uint8_t*>(numbers[3]),
                                  reinterpret_cast<void*>(numbers[7]),
                                  element_of(names->element),
                                  scaling_of(names->scaling),
                                  dtype_of(dtype),
                                  {0, nullptr}};
    was_aligned = row_of_decoded(launch).is_aligned;
    visit_element(launch.element, [&](auto element) {
      visit_stored(launch.dtype, [&](auto out) {
        run_tables<FragmentTable, kMostFragments>(
            1, kTileThreads, [&](int64_t) { return row_of_decoded(launch); },
            [&](const FragmentRow& row, int64_t item, int thread) {
              decode_tile<decltype(element), decltype(out)>(row, launch.scaling, launch.dtype, item,
                                                            thread);
            });
      });
    });
    return 1;
  });
}

// numbers has shape, values, codes, transposed codes, maximum and table.
int64_t emulate_matrix(const CodingNames* names, const int64_t* numbers, const char* dtype) {
  return guarded([&]() -> int64_t {
    const MatrixArguments arguments{coding_of(*names),      shape_at(numbers),
                                    buffer_at(numbers + 3), dtype,
                                    buffer_at(numbers + 5), buffer_at(numbers + 7),
                                    buffer_at(numbers + 9), buffer_at(numbers + 11)};
    const CudaMatrixLaunch launch = checked_matrix(arguments, {0, nullptr});
    visit_float8(launch.element, [&](auto element) {
      visit_stored(launch.dtype, [&](auto source) {
        using Element = decltype(element);
        using Source = decltype(source);
        if (are_parts_of_rows(launch)) {
          using Thread = BlockThread<Element, Source>;
          const BlockTask task = block_task_of(launch);
          was_aligned = task.is_aligned;
          for (int64_t item = 0; item < num_items_of(task); ++item) {
            std::vector<Thread> threads;
            for (int t = 0; t < kTileThreads; ++t) threads.emplace_back(task, item, t);
            const int lanes = static_cast<int>(task.lanes);
            for (int first = 0; first < kTileThreads; first += lanes) {
              BlockMaxima<Source> maxima = threads[first].maxima();
              for (int k = first + 1; k < first + lanes; ++k) {
                const BlockMaxima<Source> others = threads[k].maxima();
                for (uint32_t w = 0; w < maxima.kWords; ++w) maxima.raise(w, others.words[w]);
              }
              for (int i = 0; i < kBlockRows; ++i) {
                const uint32_t maximum = maxima.of_row(i, task.dtype);
                const float factor = threads[first + i % lanes].settle(task, i, maximum);
                for (int k = first; k < first + lanes; ++k) threads[k].finish(task, i, factor);
              }
            }
          }
          return;
        }
        using Thread = EncodeTransposedThread<Element, Source>;
        const EncodeTransposedTask task = transposed_task_of(launch);
        was_aligned = task.is_aligned && (task.transposed == nullptr || task.stores_vectors);
        for (int64_t item = 0; item < task.grid.num_items; ++item) {
          const auto shared = std::make_unique<EncodeTransposedShared>();
          std::vector<Thread> threads;
          for (int t = 0; t < kTransposeThreads; ++t) threads.emplace_back(task, item, t, *shared);
          for (const Thread& thread : threads) thread.note_maxima(task, *shared);
          for (const Thread& thread : threads) thread.share_factors(task, *shared);
          for (const Thread& thread : threads) thread.share_codes_of(task, *shared);
          for (const Thread& thread : threads) thread.write(task, *shared);
        }
      });
    });
    return 1;
  });
}

// numbers has shape, codes and transposed codes.
int64_t emulate_transpose(const char* element, const int64_t* numbers) {
  return guarded([&]() -> int64_t {
    const CudaTransposeLaunch launch = checked_transpose(
        {element, shape_at(numbers), buffer_at(numbers + 3), buffer_at(numbers + 5)}, {0, nullptr});
    const TransposeTask task = transpose_task_of(launch);
    was_aligned = task.loads_vectors && task.stores_vectors;
    for (int64_t item = 0; item < task.grid.num_items; ++item) {
      const auto shared = std::make_unique<TransposeShared>();
      const TransposeBlock block = transpose_block(task.grid, item, TransposeShared::kCols);
      for (int t = 0; t < kTransposeThreads; ++t) {
        if (launch.codes_per_byte == 1) {
          share_loaded<1>(task, block, t, *shared);
        } else {
          share_loaded<2>(task, block, t, *shared);
        }
      }
      for (int t = 0; t < kTransposeThreads; ++t) {
        if (launch.codes_per_byte == 1) {
          write_transposed<1>(task.grid, block, task.stores_vectors, t, *shared, task.out);
        } else {
          write_transposed<2>(task.grid, block, task.stores_vectors, t, *shared, task.out);
        }
      }
    }
    return 1;
  });
}
}
