#include "histories.h"

#include <string>

#include "../kernels/histories.h"
#include "arguments.h"

namespace megafsdp {
namespace {

void check_histories(const std::string& argument, const std::vector<HistoriesArguments>& given) {
  for (const auto& [histories, maxima, used, num_histories] : given) {
    check_positive(argument + ": rows", num_histories);
    check_address(argument + ": histories", histories, sizeof(int32_t));
    check_address(argument + ": maxima", maxima, sizeof(int32_t));
    check_address(argument + ": used", used, sizeof(int32_t));
  }
}

void run_histories(const std::vector<HistoriesArguments>& given, int64_t length,
                   bool is_of_weights, Simd level) {
  for (const auto& [histories, maxima, used, num_histories] : given) {
    run_at(level, HistoriesJob{reinterpret_cast<int32_t*>(histories), num_histories, length,
                               reinterpret_cast<const int32_t*>(maxima),
                               reinterpret_cast<int32_t*>(used), is_of_weights});
  }
}

}  // namespace

void check_roll(const RollArguments& arguments) {
  check_positive("length", arguments.length);
  check_histories("weights", arguments.weights);
  check_histories("operands", arguments.operands);
}

void run_roll(const RollArguments& arguments, Simd level) {
  run_histories(arguments.weights, arguments.length, true, level);
  run_histories(arguments.operands, arguments.length, false, level);
}

}  // namespace megafsdp
