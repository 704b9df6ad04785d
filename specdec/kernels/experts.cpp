// Products of rows `x` [rows, inputs] with the weights of their `experts`, int64 [rows]: only weights that rows chose
// are read. The experts' tensors lie one behind the other, each in whole blocks of 32 outputs, as dots.cpp (`rounds`) or
// linear.cpp has them; all share `levels`. Rows of one expert are multiplied together, exact and in threads as there.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "packed.h"

namespace {

at::Tensor expert_linear(const at::Tensor& x, const at::Tensor& experts, const at::Tensor& weight, const Maybe& high,
                         const Maybe& factors, const Maybe& scales, const Maybe& mins, const Maybe& steps,
                         const Maybe& levels, const Maybe& bias, int64_t outputs, int64_t way, bool rounds) {
  TORCH_CHECK_VALUE(x.dim() == 2 && outputs > 0, "`x` must be [rows, inputs], with outputs, got ", x.sizes());
  auto rows = x.size(0), blocks = (outputs + BLOCK - 1) / BLOCK, count = weight.size(0) / blocks;
  check("experts", experts, at::kLong, {rows});
  auto chosen = experts.const_data_ptr<int64_t>();
  auto fits = std::all_of(chosen, chosen + rows, [&](int64_t expert) { return 0 <= expert && expert < count; });
  TORCH_CHECK_VALUE(fits, "`experts` must be from 0 to before ", count);
  std::vector<int64_t> order(rows);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return chosen[a] < chosen[b]; });
  at::Tensor y = at::empty({rows, outputs}, x.options());
  for (auto begin = order.begin(); begin != order.end();) {
    auto expert = chosen[*begin];
    auto end = std::find_if(begin, order.end(), [&](int64_t row) { return chosen[row] != expert; });
    auto part = [&](const Maybe& all, int64_t stride, int64_t size) -> Maybe {
      return all ? Maybe(all->narrow(0, expert * stride, size)) : all;
    };
    auto of_blocks = [&](const Maybe& all) { return part(all, blocks, blocks); };
    auto of_outputs = [&](const Maybe& all) { return part(all, blocks * BLOCK, outputs); };
    auto places = at::tensor(at::ArrayRef(&*begin, end - begin));
    auto inputs = x.index_select(0, places);
    auto sums = rounds ? dots(inputs, *of_blocks(weight), of_blocks(high), of_outputs(factors), of_blocks(scales),
                              of_blocks(mins), of_blocks(steps), levels, of_outputs(bias), outputs, way, 0)
                       : packed_linear(inputs, *of_blocks(weight), of_outputs(factors), of_blocks(scales),
                                       of_blocks(mins), of_outputs(bias), outputs, way);
    y.index_copy_(0, places, sums);
    begin = end;
  }
  return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(specdec, CPU, m) { m.impl("expert_linear", expert_linear); }
