// Parts of layers of the Llama family, and layers of Whisper's decoder, each as one call: linear layers, and what
// stands between them. `x` and results are float32 or bfloat16 [1, nodes, width], `cos` and `sin` [1, nodes, turned];
// attention.cpp has the layouts of tables and buffers, to which new keys and values are written first.
//
// A part computes what transformers' module does, with the same roundings: torch computes sums and exponentials, and
// all other operations round their results, as tensors do (-ffp-contract=off). So results are equal, bit for bit.
// Threads divide rows and nodes among them. Calls change no part, so several threads may call one.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/sum.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "operators.h"

namespace {

constexpr int64_t GRAIN = 1 << 15;  // numbers that are not worth a second thread

inline float wide(float number) { return number; }
inline float wide(c10::BFloat16 number) { return std::bit_cast<float>(static_cast<uint32_t>(number.x) << 16); }

// The number rounded to T: without branches, so that compilers make vectors of it.
template <class T>
inline T narrow(float number) {
  if constexpr (std::is_same_v<T, float>) return number;
  auto bits = std::bit_cast<uint32_t>(number);
  return c10::BFloat16(static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16), c10::BFloat16::from_bits());
}

template <class T>
inline float rounded(float number) {
  return wide(narrow<T>(number));
}

template <class Work>
auto by_type(const at::Tensor& x, Work work) {
  auto type = x.scalar_type();
  TORCH_CHECK_VALUE(type == at::kFloat || type == at::kBFloat16, "`x` must be float32 or bfloat16, got ", type);
  return type == at::kFloat ? work(float()) : work(c10::BFloat16());
}

struct Linear : torch::CustomClassHolder {
  std::vector<Maybe> tensors;  // as `LAYER_TENSORS` of packed_linear.py names them
  int64_t outputs, way, likely;
  bool rounds;

  Linear(std::vector<Maybe> tensors, int64_t outputs, int64_t way, int64_t likely, bool rounds)
      : tensors(std::move(tensors)), outputs(outputs), way(way), likely(likely), rounds(rounds) {
    TORCH_CHECK_VALUE(this->tensors.size() == 8 && this->tensors[0],
                      "`tensors` must be eight tensors or None, the first a weight");
  }
  at::Tensor operator()(const at::Tensor& x) const {
    auto& t = tensors;
    if (rounds) return dots(x, *t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], outputs, way, likely);
    return packed_linear(x, *t[0], t[2], t[3], t[4], t[7], outputs, way);
  }
};

using Linears = std::vector<c10::intrusive_ptr<Linear>>;

// The outputs of `layers`, each of which gives one or several of the pieces `[..., size]`.
std::vector<at::Tensor> pieces(const char* name, const Linears& layers, const at::Tensor& x,
                               const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> parts;
  for (auto& layer : layers) {
    auto output = (*layer)(x);
    for (int64_t begin = 0, width = output.size(-1); begin < width; begin += sizes[parts.size() - 1]) {
      auto fits = parts.size() < sizes.size() && begin + sizes[parts.size()] <= width;
      TORCH_CHECK_VALUE(fits, "`", name, "` must give pieces of sizes ", sizes, ", got a layer of ", width);
      parts.push_back(output.narrow(-1, begin, sizes[parts.size()]));
    }
  }
  auto count = parts.size();
  TORCH_CHECK_VALUE(count == sizes.size(), "`", name, "` must give pieces of sizes ", sizes, ", got ", count);
  return parts;
}

// Rows in bfloat16 are rounded before a weight in bfloat16 multiplies them, and after a weight in float32 does.
struct Norm : torch::CustomClassHolder {
  at::Tensor weight;
  double eps;

  Norm(at::Tensor weight, double eps) : weight(weight.contiguous()), eps(eps) {
    auto type = weight.scalar_type();
    TORCH_CHECK_VALUE(weight.dim() == 1 && (type == at::kFloat || type == at::kBFloat16),
                      "`weight` must be float32 or bfloat16 [width], got ", type, " ", weight.sizes());
  }
  at::Tensor operator()(const at::Tensor& x) const {
    return by_type(x, [&]<class T>(T) {
      return weight.scalar_type() == at::kFloat ? of<T, float>(*x.expect_contiguous())
                                                : of<T, c10::BFloat16>(*x.expect_contiguous());
    });
  }

 private:
  template <class T, class W>
  at::Tensor of(const at::Tensor& x) const {
    auto width = weight.size(0), rows = x.numel() / std::max<int64_t>(width, 1);
    TORCH_CHECK_VALUE(x.size(-1) == width, "`x` must be [..., ", width, "], got ", x.sizes());
    auto factors = weight.const_data_ptr<W>();
    auto from = x.const_data_ptr<T>();
    auto square = at::empty(x.sizes(), x.options().dtype(at::kFloat)), y = at::empty_like(x);
    auto squares = square.mutable_data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); i++) squares[i] = wide(from[i]) * wide(from[i]);
    auto sum = at::sum(square, -1);
    auto sums = sum.const_data_ptr<float>();
    auto to = y.mutable_data_ptr<T>();
    constexpr auto rounds_first = std::is_same_v<T, W>;
    at::parallel_for(0, rows, GRAIN / width + 1, [&](int64_t begin, int64_t end) {
      for (auto row = begin; row < end; row++) {
        auto inverse = 1 / std::sqrt(sums[row] / static_cast<float>(width) + static_cast<float>(eps));
        for (auto i = row * width, j = int64_t(0); j < width; i++, j++) {
          auto number = wide(from[i]) * inverse;
          to[i] = narrow<T>(wide(factors[j]) * (rounds_first ? rounded<T>(number) : number));
        }
      }
    });
    return y;
  }
};

using Norms = std::optional<c10::intrusive_ptr<Norm>>;

// What surrounds a part within its layer: norms before and after it, and the sum with its input.
struct Frame {
  Norms before, after;
  bool adds;

  at::Tensor begin(const at::Tensor& x) const { return before ? (**before)(x) : x; }
  at::Tensor end(const at::Tensor& x, const at::Tensor& y) const {
    auto normed = after ? (**after)(y) : y;
    return adds ? at::add(x, normed) : normed;
  }
};

// Rotates heads `[1, nodes, heads, width]` by `cos` and `sin` `[1, nodes, turned]`.
template <class T, class C>
void rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  auto nodes = x.size(1), heads = x.size(2), turned = cos.size(-1), half = turned / 2;
  auto to = x.mutable_data_ptr<T>();
  at::parallel_for(0, nodes, GRAIN / (heads * turned + 1) + 1, [&](int64_t begin, int64_t end) {
    for (auto node = begin; node < end; node++)
      for (int64_t head = 0; head < heads; head++) {
        auto low = to + node * x.stride(1) + head * x.stride(2), high = low + half;
        auto c = cos.const_data_ptr<C>() + node * turned, s = sin.const_data_ptr<C>() + node * turned;
#pragma GCC ivdep
        for (int64_t i = 0; i < half; i++) {
          auto a = wide(low[i]), b = wide(high[i]);
          auto low_cos = rounded<C>(a * wide(c[i])), high_sin = rounded<C>(b * wide(s[i]));
          auto high_cos = rounded<C>(b * wide(c[i + half])), low_sin = rounded<C>(a * wide(s[i + half]));
          low[i] = narrow<T>(low_cos - high_sin), high[i] = narrow<T>(high_cos + low_sin);
        }
      }
  });
}

struct Attention : torch::CustomClassHolder {
  Linears qkv;  // apart or joined
  c10::intrusive_ptr<Linear> out;
  Norms q_norm, k_norm;
  std::vector<int64_t> heads;  // numbers of query and of key heads, widths of keys and of values
  double scale, softcap;
  Maybe sinks;
  Frame frame;

  Attention(Linears qkv, c10::intrusive_ptr<Linear> out, Norms q_norm, Norms k_norm, std::vector<int64_t> heads,
            double scale, double softcap, Maybe sinks, Norms before, Norms after, bool adds)
      : qkv(std::move(qkv)), out(std::move(out)), q_norm(std::move(q_norm)), k_norm(std::move(k_norm)),
        heads(std::move(heads)), scale(scale), softcap(softcap), sinks(std::move(sinks)),
        frame{std::move(before), std::move(after), adds} {}

  // `x` is `[1, nodes, width]`; `attend` says what tables and buffers are.
  at::Tensor run(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& nodes,
                 const at::Tensor& keys, const at::Tensor& values) const {
    auto count = x.size(1);
    TORCH_CHECK_VALUE(x.dim() == 3 && x.size(0) == 1, "`x` must be [1, nodes, width], got ", x.sizes());
    auto parts = pieces("qkv", qkv, frame.begin(x), {heads[0] * heads[2], heads[1] * heads[2], heads[1] * heads[3]});
    auto split = [&](at::Tensor& part, const Norms& norm, int64_t number, int64_t width) {
      if (norm) part = (**norm)(part.reshape({1, count, -1, (*norm)->weight.size(0)}));
      part = part.view({1, count, number, width});
    };
    split(parts[0], q_norm, heads[0], heads[2]);
    split(parts[1], k_norm, heads[1], heads[2]);
    split(parts[2], {}, heads[1], heads[3]);
    auto type = x.scalar_type();
    for (auto& table : {cos, sin})
      TORCH_CHECK_VALUE(table.sizes() == at::IntArrayRef({1, count, cos.size(-1)}) && table.is_contiguous() &&
                        table.scalar_type() == cos.scalar_type() && table.size(-1) % 2 == 0 &&
                        table.size(-1) <= heads[2] && (type == cos.scalar_type() || cos.scalar_type() == at::kFloat),
                        "`cos` and `sin` must be float32 or ", type, " [1, ", count, ", at most ", heads[2], "], got ",
                        table.scalar_type(), " ", table.sizes());
    by_type(x, [&]<class T>(T) {
      auto turn = cos.scalar_type() == at::kFloat ? rotate<T, float> : rotate<T, T>;
      turn(parts[0], cos, sin), turn(parts[1], cos, sin);
    });
    store_nodes(parts[1].transpose(1, 2), parts[2].transpose(1, 2), keys, values, nodes);
    auto seen = attend(parts[0].transpose(1, 2), keys, values, nodes, scale, softcap, sinks, {});
    return frame.end(x, (*out)(seen.view({1, count, -1})));
  }
};

// An activation by transformers' name; "sigmoid" and "tanh" are activations of strict models (ragged_model.py).
at::Tensor activated(const at::Tensor& x, const std::string& name, double scale) {
  if (name == "silu") return at::silu(x);
  if (name == "gelu") return at::gelu(x);
  if (name == "gelu_pytorch_tanh") return at::gelu(x, "tanh");
  auto exact = x.to(at::kFloat);
  if (name == "sigmoid") return exact.div(at::exp(exact.mul(-scale)).add(1)).to(x.scalar_type());
  TORCH_CHECK_VALUE(name == "tanh", "`name` must be an activation's, got ", name);
  auto inner = exact.add(exact.mul(0.044715).mul(exact).mul(exact)).mul(std::sqrt(2 / M_PI));
  return exact.mul(0.5).mul(inner.tanh().add(1)).to(x.scalar_type());
}

struct Gated : torch::CustomClassHolder {
  Linears gate_up;  // apart or joined
  bool is_apart;    // whether the model has a layer for the gate alone: the layout of a tensor decides torch's last bit
  c10::intrusive_ptr<Linear> down;
  std::string activation;
  double scale;
  Frame frame;

  Gated(Linears gate_up, bool is_apart, c10::intrusive_ptr<Linear> down, std::string activation, double scale,
        Norms before, Norms after, bool adds)
      : gate_up(std::move(gate_up)), is_apart(is_apart), down(std::move(down)), activation(std::move(activation)),
        scale(scale), frame{std::move(before), std::move(after), adds} {}

  at::Tensor run(const at::Tensor& x) const {
    int64_t outputs = 0;
    for (auto& layer : gate_up) outputs += layer->outputs;
    auto parts = pieces("gate_up", gate_up, frame.begin(x), {outputs / 2, outputs / 2});
    auto gate = is_apart ? parts[0].contiguous() : parts[0];
    return frame.end(x, (*down)(activated(gate, activation, scale).mul(parts[1])));
  }
};

// A layer that attends over the text and then over an encoder's frames, each after a norm with a mean.
struct Crossed : torch::CustomClassHolder {
  Linears qkv;     // apart or joined
  Linears layers;  // the text's out, the frames' queries and out, up, down
  std::vector<at::Tensor> norms;  // a weight and a bias of each
  double eps, scale;
  int64_t heads;
  std::string activation;

  Crossed(Linears qkv, Linears layers, std::vector<at::Tensor> norms, double eps, double scale, int64_t heads,
          std::string activation)
      : qkv(std::move(qkv)), layers(std::move(layers)), norms(std::move(norms)), eps(eps), scale(scale), heads(heads),
        activation(std::move(activation)) {
    TORCH_CHECK_VALUE(this->layers.size() == 5 && this->norms.size() == 6, "`layers` must be five layers and `norms` ",
                      "six tensors, got ", this->layers.size(), " and ", this->norms.size());
  }

  // `x` is `[1, nodes, width]`; `attend` says what tables and buffers are, first the text's, then the frames'.
  at::Tensor run(const at::Tensor& x, const at::Tensor& nodes, const at::Tensor& keys, const at::Tensor& values,
                 const at::Tensor& seen, const at::Tensor& frame_keys, const at::Tensor& frame_values) const {
    TORCH_CHECK_VALUE(x.dim() == 3 && x.size(0) == 1, "`x` must be [1, nodes, width], got ", x.sizes());
    auto count = x.size(1), width = x.size(2);
    auto normed = [&](const at::Tensor& y, int64_t number) {
      return at::layer_norm(y, {width}, norms[2 * number], norms[2 * number + 1], eps);
    };
    auto split = [&](const at::Tensor& y) { return y.view({1, count, heads, -1}).transpose(1, 2); };
    auto attended = [&](const at::Tensor& queries, const at::Tensor& table, const at::Tensor& k, const at::Tensor& v) {
      return attend(split(queries.mul(scale)), k, v, table, 1.0, 0.0, {}, {}).view({1, count, -1});
    };
    auto parts = pieces("qkv", qkv, normed(x, 0), {width, width, width});
    store_nodes(split(parts[1]), split(parts[2]), keys, values, nodes);
    auto y = at::add(x, (*layers[0])(attended(parts[0], nodes, keys, values)));
    y = at::add(y, (*layers[2])(attended((*layers[1])(normed(y, 1)), seen, frame_keys, frame_values)));
    return at::add(y, (*layers[4])(activated((*layers[3])(normed(y, 2)), activation, 1)));
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.class_<Linear>("Linear").def(torch::init<std::vector<Maybe>, int64_t, int64_t, int64_t, bool>());
  m.class_<Norm>("Norm").def(torch::init<at::Tensor, double>());
  m.class_<Attention>("Attention")
      .def(torch::init<Linears, c10::intrusive_ptr<Linear>, Norms, Norms, std::vector<int64_t>, double, double, Maybe,
                       Norms, Norms, bool>());
  m.class_<Gated>("Gated")
      .def(torch::init<Linears, bool, c10::intrusive_ptr<Linear>, std::string, double, Norms, Norms, bool>());
  m.class_<Crossed>("Crossed")
      .def(torch::init<Linears, Linears, std::vector<at::Tensor>, double, double, int64_t, std::string>());
  m.def("norm(__torch__.torch.classes.specdec.Norm part, Tensor x) -> Tensor");
  m.def("attention(__torch__.torch.classes.specdec.Attention part, Tensor x, Tensor cos, Tensor sin, Tensor nodes, "
        "Tensor(a!) keys, Tensor(b!) values) -> Tensor");
  m.def("gated(__torch__.torch.classes.specdec.Gated part, Tensor x) -> Tensor");
  m.def("crossed(__torch__.torch.classes.specdec.Crossed part, Tensor x, Tensor nodes, Tensor(a!) keys, "
        "Tensor(b!) values, Tensor seen, Tensor frame_keys, Tensor frame_values) -> Tensor");
}

TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  using c10::intrusive_ptr;
  m.impl("norm", [](const intrusive_ptr<Norm>& part, const at::Tensor& x) { return (*part)(x); });
  m.impl("attention", [](const intrusive_ptr<Attention>& part, const at::Tensor& x, const at::Tensor& cos,
                         const at::Tensor& sin, const at::Tensor& nodes, const at::Tensor& keys,
                         const at::Tensor& values) { return part->run(x, cos, sin, nodes, keys, values); });
  m.impl("gated", [](const intrusive_ptr<Gated>& part, const at::Tensor& x) { return part->run(x); });
  m.impl("crossed", [](const intrusive_ptr<Crossed>& part, const at::Tensor& x, const at::Tensor& nodes,
                       const at::Tensor& keys, const at::Tensor& values, const at::Tensor& seen,
                       const at::Tensor& frame_keys, const at::Tensor& frame_values) {
    return part->run(x, nodes, keys, values, seen, frame_keys, frame_values);
  });
}
