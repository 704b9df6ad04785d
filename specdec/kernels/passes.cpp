// A model's recorded passes, and chains of them: a draft guesses token after token in one call.
//
// Between two passes a token is chosen from the logits of each row, and the next pass reads it; positions and tables of
// all passes are computed beforehand. The rule that ends a row's chain is given as numbers:
//
//   edges, bases, rates
//                  a guess of probability p, in bin b of the bins between `edges`, is accepted with the chance
//                  min(bases[b] + p * rates[b], 1)
//   least          the chain goes on while the product of the chances of its guesses is more than that
//   pass_cost      all chains end unless the chances of those that go on exceed their `least` by so much in sum
//   text, match    the chain ends where its last tokens, `match` of them, stand in the text before its last; 0: nowhere
//
// A head reads a token's embedding beside the hidden state that the previous pass returned.
//
// A pass calls the recorded operators in their order, so it returns, bit for bit, what the model's Python returns.
// Callers check shapes and tables, and let no two threads run passes over the same buffers.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "filters.h"

namespace {

using Tensors = std::vector<at::Tensor>;

struct Guess {
  int64_t token;
  double probability;
  std::vector<std::pair<int64_t, double>> siblings;  // the next likeliest tokens, and their probabilities
};

// How guesses are chosen from logits: after filters the likeliest token, or the one that its noise favours.
struct Choice {
  std::vector<std::unique_ptr<Filter>> filters;
  std::vector<int64_t> noise;  // an address and the place of the first guess below it; of the likeliest token, nothing

  bool is_plain() const { return filters.empty() && noise.empty(); }
};

// The likeliest token, where `most` is the largest score, and its probability: 1 unless it must be known. Beside it, at
// most so many siblings of a finite score.
template <class In>
Guess likeliest(const In* scores, int64_t count, float most, bool confident, int64_t siblings) {
  Guess guess{0, confident ? 1 / mass(scores, count, most) : 1, {}};
  while (static_cast<float>(scores[guess.token]) != most) guess.token++;
  if (siblings <= 0) return guess;
  for (auto [score, token] : best_of(scores, count, siblings + 1))
    if (token != guess.token && score != NEVER)
      guess.siblings.emplace_back(token, std::exp(score - most) * guess.probability);
  return guess;
}

// The token that the noise at `address` favours, and its probability, as above. Beside it, those that the noise favours
// next among the likeliest: they share what it leaves of the probability.
Guess favoured(const float* scores, int64_t count, float most, uint64_t address, bool confident, int64_t siblings) {
  constexpr int64_t AMONG = 64;
  Guess guess{drawn(scores, count, most, address), 1, {}};
  if (confident) guess.probability = std::exp(scores[guess.token] - most) / mass(scores, count, most);
  if (siblings <= 0) return guess;
  Noise noise(address);
  std::vector<std::pair<double, int64_t>> others;
  for (auto [score, token] : best_of(scores, count, AMONG))
    if (token != guess.token && score != NEVER)
      others.emplace_back(score + noise.of(static_cast<uint32_t>(token)), token);
  std::sort(others.begin(), others.end(), std::greater<>());
  double whole = 0;
  for (auto [sum, token] : others) whole += std::exp(sum - others[0].first);
  others.resize(std::min<size_t>(others.size(), siblings));
  for (auto [sum, token] : others)
    guess.siblings.emplace_back(token, (1 - guess.probability) * std::exp(sum - others[0].first) / whole);
  return guess;
}

// The rule of a row's chain: filters, noise of a choice, most guesses, number of tokens to choose from, tokens that end
// the chain, siblings of a guess, text, match, edges, bases, rates, least chance, cost of a pass, whether probabilities
// are needed, and whether scores are kept.
using Rule = std::tuple<std::vector<std::tuple<std::string, Numbers>>, std::vector<int64_t>, int64_t, int64_t,
                        std::vector<int64_t>, int64_t, std::vector<int64_t>, int64_t, Numbers, Numbers, Numbers, double,
                        double, bool, bool>;

// The chain of a row.
struct Chain {
  Choice choice;
  int64_t most, width;
  std::vector<int64_t> ends;
  int64_t siblings;
  std::vector<int64_t> text;  // and behind it the guesses
  int64_t match, length;  // of the text
  std::vector<double> edges, bases, rates;
  double least, pass_cost;
  bool confident, keeps_scores;
  std::vector<int64_t> tokens;        // each guess, and behind it its siblings
  std::vector<double> probabilities;  // their probabilities; 0 where a guess has fewer siblings
  Tensors scores;  // one tensor a guess, after filters, if they are kept
  double chance = 1;

  explicit Chain(Rule rule) {
    std::vector<std::tuple<std::string, Numbers>> filters;
    std::tie(filters, choice.noise, most, width, ends, siblings, text, match, edges, bases, rates, least, pass_cost,
             confident, keeps_scores) = std::move(rule);
    length = static_cast<int64_t>(text.size());
    for (const auto& [name, numbers] : filters) choice.filters.push_back(filter(name, numbers));
  }

  // Adds a guess from logits `[vocab]`; returns whether the chain goes on, if a pass pays.
  bool grow(const at::Tensor& logits) {
    auto step = static_cast<int64_t>(tokens.size()) / (1 + siblings);
    auto [token, probability, others] = guess(logits, step);
    others.insert(others.begin(), {token, probability});
    others.resize(1 + siblings);
    for (auto [other, share] : others) tokens.push_back(other), probabilities.push_back(share);
    for (auto& filter : choice.filters) filter->follow(token);
    text.push_back(token);
    auto bin = std::upper_bound(edges.begin(), edges.end(), probability) - edges.begin();
    chance *= std::min(bases.at(bin) + probability * rates.at(bin), 1.0);
    return chance > least && step + 1 < most &&  // NaN is not large enough
           std::find(ends.begin(), ends.end(), token) == ends.end() && !is_followed();
  }

  // The last guess.
  int64_t last() const { return tokens.end()[-1 - siblings]; }

 private:
  // Whether the last tokens, `match` of them, stand in the text, and a token follows them there.
  bool is_followed() const {
    if (match <= 0 || match >= length) return false;
    auto last = text.begin() + length - 1;
    return std::search(text.begin(), last, text.end() - match, text.end()) != last;
  }

  // Guess `step` from logits `[vocab]`; its probability is NaN if the largest score is not a number or infinite.
  Guess guess(const at::Tensor& logits, int64_t step) {
    Guess none{0, std::nan(""), {}};
    auto count = std::min(logits.size(-1), width);
    auto last = logits.contiguous();
    if (choice.is_plain() && !keeps_scores && last.scalar_type() == at::kBFloat16) {
      auto scores = last.const_data_ptr<at::BFloat16>();
      auto most = largest(scores, count);
      return std::isfinite(most) ? likeliest(scores, count, most, confident, siblings) : none;
    }
    auto copies = keeps_scores || !choice.is_plain();
    auto exact = last.slice(0, 0, count).to(at::kFloat, /*non_blocking=*/false, copies);
    auto numbers = exact.mutable_data_ptr<float>();
    for (auto& filter : choice.filters) filter->apply(numbers, count, step);
    if (keeps_scores) scores.push_back(exact);
    auto most = largest(numbers, count);
    if (!std::isfinite(most)) return none;
    if (choice.noise.empty()) return likeliest(numbers, count, most, confident, siblings);
    auto address = folded(static_cast<uint64_t>(choice.noise[0]), static_cast<uint64_t>(choice.noise[1] + step));
    return favoured(numbers, count, most, address, confident, siblings);
  }
};

// A head's inputs `[1, rows, width]` for guesses: embeddings beside the hidden states that the last pass returned, `[1,
// rows, …]`. A row of the table `[blocks, rows of a block, parts, numbers of a part]` begins with an embedding.
at::Tensor embedded(const std::vector<int64_t>& tokens, const at::Tensor& table, const at::Tensor& hidden,
                    int64_t width) {
  Tensors rows;
  auto count = width - hidden.size(-1), most = table.size(2) * table.size(3);
  TORCH_CHECK_VALUE(0 <= count && count <= most, "`embeddings` must have at least ", count, " numbers, got ", most);
  for (auto token : tokens) {
    auto row = table.select(0, token / table.size(1)).select(0, token % table.size(1));
    rows.push_back(row.flatten().slice(0, 0, count));
  }
  return at::cat({at::stack(rows).to(hidden.scalar_type()).unsqueeze(0), hidden}, -1);
}

// A value as the schema's `type` holds it: lists come as tuples, and some numbers stand for tensors.
c10::IValue typed(const c10::IValue& value, const c10::TypePtr& type) {
  if (value.isNone()) return value;
  if (auto optional = type->cast<c10::OptionalType>()) return typed(value, optional->getElementType());
  if (type->kind() == c10::TypeKind::FloatType) return value.isInt() ? static_cast<double>(value.toInt()) : value;
  if (type->kind() == c10::TypeKind::TensorType && value.isScalar()) {
    auto scalar = value.toScalar();
    auto number = at::scalar_tensor(scalar, scalar.type());
    number.unsafeGetTensorImpl()->set_wrapped_number(true);  // its type does not decide the type of a result
    return number;
  }
  auto list = type->cast<c10::ListType>();
  if (!list) return value;
  auto element = list->getElementType();
  if (element->kind() == c10::TypeKind::SymIntType) element = c10::IntType::get();
  c10::impl::GenericList items(element);
  for (auto& item : value.toTupleRef().elements()) items.push_back(typed(item, element));
  return items;
}

// A recorded call of an operator. Each pass fills its values and sizes in.
struct Call {
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  std::vector<std::array<int64_t, 3>> values;  // an argument, a place in its list or -1, a value
  std::vector<std::array<int64_t, 4>> sizes;   // an argument, a place, a size of the inputs, and its factor
  std::vector<int64_t> results;                // the values that it makes, in order
  std::vector<int64_t> garbage;                // the values that no later call reads
};

// Puts a value into an argument, or into a place of a copy of it: passes share the list.
void put(c10::IValue& argument, int64_t place, c10::IValue value) {
  if (place < 0) {
    argument = std::move(value);
    return;
  }
  auto list = argument.toList().copy();
  list.set(place, std::move(value));
  argument = std::move(list);
}

// The passes of a model, as Python recorded one of them. Values have numbers: first the inputs of a pass, then the
// constants, then the results of calls.
struct Passes : torch::CustomClassHolder {
  // `sizes`: the sizes of inputs that passes read, each by the numbers of an input and of a dimension.
  Passes(int64_t inputs, std::vector<std::vector<int64_t>> sizes, Tensors constants)
      : inputs(inputs), sizes(std::move(sizes)), constants(std::move(constants)) {}

  // Adds the call of an operator; `values`, `sizes` and `results` are as in Call.
  void add(const std::string& name, const std::string& overload, const c10::IValue& arguments,
           const std::vector<std::vector<int64_t>>& values, const std::vector<std::vector<int64_t>>& sizes,
           std::vector<int64_t> results) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    Call call{op, {}, {}, {}, std::move(results), {}};
    auto& elements = arguments.toTupleRef().elements();
    auto& schema = op.schema().arguments();
    auto takes = schema.size();
    TORCH_CHECK_VALUE(elements.size() == takes, name, " takes ", takes, " arguments, got ", elements.size());
    for (size_t i = 0; i < takes; i++) call.arguments.push_back(typed(elements[i], schema[i].type()));
    for (auto& value : values) call.values.push_back({value.at(0), value.at(1), value.at(2)});
    for (auto& size : sizes) call.sizes.push_back({size.at(0), size.at(1), size.at(2), size.at(3)});
    for (auto number : call.results) count = std::max(count, number + 1);
    calls.push_back(std::move(call));
  }

  // Says which values a pass returns; the others are freed after the last call that reads them.
  void end(std::vector<int64_t> returned) {
    outputs = std::move(returned);
    std::vector<bool> read(std::max(count, inputs + static_cast<int64_t>(constants.size())));
    for (auto number : outputs) read.at(number) = true;
    for (auto call = calls.rbegin(); call != calls.rend(); call++) {
      for (auto number : call->results)
        if (!read.at(number)) call->garbage.push_back(number);
      for (auto& [argument, place, number] : call->values)
        if (!read.at(number)) read[number] = true, call->garbage.push_back(number);
    }
    count = static_cast<int64_t>(read.size());
  }

  // Runs a pass over its inputs; returns the values that `end` says.
  Tensors run(Tensors values) const {
    TORCH_CHECK_VALUE(static_cast<int64_t>(values.size()) == inputs, "a pass has ", inputs, " inputs, got ",
                      values.size());
    at::AutoDispatchBelowAutograd guard;
    std::vector<int64_t> numbers;
    for (auto& size : sizes) numbers.push_back(values.at(size.at(0)).size(size.at(1)));
    values.insert(values.end(), constants.begin(), constants.end());
    values.resize(count);
    torch::jit::Stack stack;
    for (auto& call : calls) {
      stack = call.arguments;
      for (auto& [argument, place, number] : call.values) put(stack[argument], place, values[number]);
      for (auto& [argument, place, size, factor] : call.sizes) put(stack[argument], place, factor * numbers.at(size));
      call.op.callBoxed(stack);
      auto place = call.results.begin();
      for (auto& result : stack) {
        if (result.isTensor()) values[*place++] = std::move(result).toTensor();
        else if (result.isTensorList())
          for (at::Tensor tensor : result.toTensorVector()) values[*place++] = std::move(tensor);
      }
      for (auto number : call.garbage) values[number].reset();
    }
    Tensors results;
    for (auto number : outputs) results.push_back(values[number]);
    return results;
  }

  // Drafts a chain per row: guesses, their probabilities (NaN: no guess), and their scores `[guesses, tokens]` if kept.
  // The first pass has inputs `first` and returns the logits after the rows' texts. Each later one reads a guess of
  // every row whose chain goes on, with these rows of `positions` `[passes, 1, rows]`, `tables` `[passes, 1, 1, rows,
  // …]` and `encoders` `[1, 1, rows, …]`, and all `buffers`. A model with `embeddings` is a head.
  std::tuple<std::vector<std::vector<int64_t>>, std::vector<std::vector<double>>, Tensors> draft_chain(
      Tensors first, at::Tensor positions, Tensors tables, Tensors encoders, Tensors buffers, std::vector<Rule> rules,
      std::optional<at::Tensor> embeddings) {
    std::vector<Chain> chains(std::make_move_iterator(rules.begin()), std::make_move_iterator(rules.end()));
    std::vector<int64_t> rows(chains.size());  // the rows of a pass
    std::iota(rows.begin(), rows.end(), 0);
    auto width = first[0].size(-1);
    auto outputs = run(std::move(first));
    TORCH_CHECK_VALUE(outputs[0].size(1) == static_cast<int64_t>(chains.size()), "`rules` must be one for each of ",
                      outputs[0].size(1), " rows, got ", chains.size());
    auto states = outputs.size() - 1;
    for (int64_t pass = 0;; pass++) {
      std::vector<int64_t> next, places, tokens;  // the rows that go on, their places in the last pass, and guesses
      double gain = 0, cost = 0;
      for (int64_t place = 0; place < static_cast<int64_t>(rows.size()); place++) {
        auto& chain = chains[rows[place]];
        if (!chain.grow(outputs[0].select(0, 0).select(0, place))) continue;
        next.push_back(rows[place]), places.push_back(place), tokens.push_back(chain.last());
        gain += chain.chance - chain.least, cost = std::max(cost, chain.pass_cost);
      }
      if (next.empty() || gain < cost) break;
      auto index = at::tensor(next), nodes = at::arange(static_cast<int64_t>(next.size()));
      auto& hidden = outputs.back();
      Tensors values{embeddings ? embedded(tokens, *embeddings, hidden.index_select(1, at::tensor(places)), width)
                                : at::tensor(tokens).unsqueeze(0),
                     positions.select(0, pass).index_select(1, index), nodes};
      for (auto& table : tables) values.push_back(table.select(0, pass).index_select(2, index));
      for (auto& table : encoders) values.push_back(table.index_select(2, index));
      values.insert(values.end(), buffers.begin(), buffers.end());
      values.insert(values.end(), states, embeddings ? nodes : at::empty({0}, at::kLong));
      values.push_back(nodes);
      outputs = run(std::move(values));
      rows = std::move(next);
    }
    std::vector<std::vector<int64_t>> tokens;
    std::vector<std::vector<double>> probabilities;
    Tensors scores;
    for (auto& chain : chains) {
      tokens.push_back(std::move(chain.tokens));
      probabilities.push_back(std::move(chain.probabilities));
      if (chain.keeps_scores) scores.push_back(at::stack(chain.scores));
    }
    return {tokens, probabilities, scores};
  }

 private:
  std::vector<Call> calls;
  std::vector<int64_t> outputs;
  int64_t inputs, count = 0;
  std::vector<std::vector<int64_t>> sizes;
  Tensors constants;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, m) {
  m.class_<Passes>("Passes")
      .def(torch::init<int64_t, std::vector<std::vector<int64_t>>, Tensors>())
      .def("add", &Passes::add)
      .def("end", &Passes::end)
      .def("run", &Passes::run)
      .def("draft_chain", &Passes::draft_chain);
}
