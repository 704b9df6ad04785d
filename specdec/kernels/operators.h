// Operators that other operators call without a detour through torch: ops.py says what they compute; linear.cpp,
// dots.cpp and attention.cpp have the layouts of their tensors. Each checks its arguments.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

using Maybe = std::optional<at::Tensor>;

at::Tensor packed_linear(const at::Tensor& x, const at::Tensor& weight, const Maybe& factors, const Maybe& scales,
                         const Maybe& mins, const Maybe& bias, int64_t outputs, int64_t way);

at::Tensor dots(const at::Tensor& x, const at::Tensor& weight, const Maybe& high, const Maybe& factors,
                const Maybe& scales, const Maybe& mins, const Maybe& steps, const Maybe& levels, const Maybe& bias,
                int64_t outputs, int64_t way, int64_t likely);

at::Tensor attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values, const at::Tensor& nodes,
                  double scale, double softcap, const Maybe& sinks, const Maybe& biases);

void store_nodes(const at::Tensor& keys, const at::Tensor& values, const at::Tensor& key_buffer,
                 const at::Tensor& value_buffer, const at::Tensor& nodes);
