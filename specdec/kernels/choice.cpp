// Top-k, top-p, draws, and the best token after filters as operators on the CPU, in the calling thread, over `scores`:
// float32 [rows, vocabulary] (`best_token`: any dtype, [vocabulary]). A row's result does not depend on other rows.
// In place of a token, -1: all scores are -inf, -2: one is NaN; `best_token` returns the place of a NaN.

#include "filters.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

namespace {

constexpr int64_t EMPTY = -1, BROKEN = -2;  // as in noise.py: all scores are -inf, or one is NaN

void check(const at::Tensor& scores) {
  TORCH_CHECK_VALUE(scores.dim() == 2 && scores.scalar_type() == at::kFloat && scores.size(1) > 0,
                    "scores must be [rows, vocabulary] in float32, got ", scores.scalar_type(), " ", scores.sizes());
}

// A copy of `scores` in which the k largest of each row, and of these the top-p ones, stay; k = 0 keeps all.
at::Tensor keep_top(const at::Tensor& scores, int64_t k, double p, int64_t least) {
  check(scores);
  TORCH_CHECK_VALUE(k >= 0 && least >= 1, "k must be at least 0, and least at least 1, got ", k, " and ", least);
  auto copy = scores.clone(at::MemoryFormat::Contiguous);
  auto count = copy.size(1);
  for (int64_t row = 0; row < copy.size(0); row++)
    keep_most(copy.mutable_data_ptr<float>() + row * count, count, k, p, least);
  return copy;
}

// A token for each row of `scores`, with the noise of its address.
at::Tensor draws(const at::Tensor& scores, at::IntArrayRef addresses) {
  check(scores);
  TORCH_CHECK_VALUE(static_cast<int64_t>(addresses.size()) == scores.size(0), "every row needs an address, got ",
                    addresses.size(), " for ", scores.size(0));
  auto dense = scores.contiguous();
  auto count = dense.size(1);
  auto tokens = at::empty({dense.size(0)}, at::kLong);
  for (int64_t row = 0; row < dense.size(0); row++) {
    auto from = dense.const_data_ptr<float>() + row * count;
    auto most = largest(from, count);
    tokens.mutable_data_ptr<int64_t>()[row] = std::isnan(most) ? BROKEN
                                              : most == NEVER
                                                  ? EMPTY
                                                  : drawn(from, count, most, static_cast<uint64_t>(addresses[row]));
  }
  return tokens;
}

// The first token with the largest of the `scores` `[vocabulary]` after filters: filter i has `counts[i]` of `numbers`.
int64_t best_token(const at::Tensor& scores, const std::vector<std::string>& names, at::ArrayRef<double> numbers,
                   at::IntArrayRef counts) {
  TORCH_CHECK_VALUE(scores.dim() == 1 && scores.numel() && names.size() == counts.size(), "`scores` must be ",
                    "[vocabulary] and `counts` one for each filter, got ", scores.sizes(), " and ", counts);
  auto copy = scores.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  auto begin = copy.mutable_data_ptr<float>(), end = begin + copy.numel();
  int64_t first = 0;
  for (size_t i = 0; i < names.size(); first += counts[i++]) {
    auto of_filter = numbers.slice(first, counts[i]);
    filter(names[i], Numbers(of_filter.begin(), of_filter.end()))->apply(begin, copy.numel(), 0);
  }
  auto most = largest(begin, copy.numel());
  if (most == NEVER) return EMPTY;
  return std::find_if(begin, end, [&](float score) { return score == most || std::isnan(score); }) - begin;
}

}  // namespace

TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("keep_top", &keep_top);
  m.impl("draws", &draws);
  m.impl("best_token", &best_token);
}
