// Operators: each is the CPU's, run later on the current stream, on the device's memory.
//
// [Note: What an operator returns]
// The host must know shapes and dtypes of results when it issues an operator, as on CUDA. An
// operator that writes to its arguments returns those. For another one the CPU's operator runs at
// once on stand-ins of the same layout, once for each combination of layouts and numbers. Where
// shapes depend on values the host has to wait, and so it does here.
#pragma once

namespace lag {

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> = {},
                         std::optional<c10::Device> = {}, std::optional<bool> = {}) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &DeviceMemory::the(), keys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &DeviceMemory::the(), keys, c10::dtype_or_default(dtype),
                                   format);
}

// Operators whose results' shapes depend on values.
inline bool has_unknown_shapes(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::nonzero",       "aten::masked_select",      "aten::_unique",
      "aten::_unique2",      "aten::unique_dim",         "aten::unique_consecutive",
      "aten::bincount",      "aten::repeat_interleave",  "aten::unique_dim_consecutive",
  };
  return names.count(name) > 0;
}

// Operators that take tensors of the host too, as on CUDA: indices, lengths, numbers of lists.
inline bool may_take_host_tensors(const std::string& name) {
  for (const char* start : {"aten::index", "aten::_index", "aten::_foreach_", "aten::_pack"}) {
    if (name.rfind(start, 0) == 0) return true;
  }
  return false;
}

// An argument or a result: a value, or tensors.
struct Argument {
  enum Kind { kValue, kTensor, kTensors, kOptionalTensors, kGenerator } kind = kValue;
  c10::IValue value;
  std::vector<Operand> operands;

  Argument(const c10::IValue& given, const c10::Argument& declared) {
    const auto& type = *declared.type();
    if (given.isTensor()) {
      kind = kTensor;
      operands.emplace_back(given.toTensor());
    } else if (given.isTensorList()) {
      kind = kTensors;
      for (const auto& tensor : given.toTensorVector()) operands.emplace_back(tensor);
    } else if (given.isOptionalTensorList()) {
      kind = kOptionalTensors;
      for (const std::optional<at::Tensor>& tensor : given.toOptionalTensorVector()) {
        operands.emplace_back(tensor.value_or(at::Tensor()));
      }
    } else if (type.str() == "Generator" || type.str() == "Generator?") {
      kind = kGenerator;
      value = given;
    } else {
      value = given.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : given;
    }
  }

  template <typename F>
  c10::IValue with(F as_tensor) const {
    if (kind == kValue || kind == kGenerator) return value;
    if (kind == kTensor) return as_tensor(operands[0]);
    if (kind == kTensors) {
      std::vector<at::Tensor> tensors;
      for (const auto& operand : operands) tensors.push_back(as_tensor(operand));
      return tensors;
    }
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& operand : operands) {
      tensors.push_back(operand.is_defined ? std::make_optional(as_tensor(operand)) : std::nullopt);
    }
    return tensors;
  }
};

// The layout of a result that is new, or the value of one that is no tensor.
struct Layout {
  bool is_defined;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;

  explicit Layout(const at::Tensor& tensor) : is_defined(tensor.defined()) {
    if (!is_defined) return;
    sizes = tensor.sizes().vec();
    strides = tensor.strides().vec();
    dtype = tensor.scalar_type();
  }

  at::Tensor make() const {
    return is_defined ? empty_strided(sizes, strides, dtype) : at::Tensor();
  }
};

struct Outcome {
  std::vector<std::vector<Layout>> results;       // for each result that is new
  std::vector<bool> are_lists;
  std::map<size_t, std::vector<int64_t>> resized;  // arguments by their index
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(*stack), num_arguments_(schema_.arguments().size()) {
    for (size_t i = 0; i < num_arguments_; i++) {
      arguments_.emplace_back(given(i), schema_.arguments()[i]);
    }
  }

  void run() {
    TORCH_CHECK_NOT_IMPLEMENTED(!returns_view(), "lag: no kernel for the view ", schema_.name());
    check_devices();
    if (needs_values()) return run_at_once();
    if (has_new_results() || has_empty_out()) {
      issue(outcome());
    } else {
      issue(Outcome());
    }
  }

 private:
  const c10::IValue& given(size_t i) const { return stack_[stack_.size() - num_arguments_ + i]; }

  static bool is_written(const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
  }

  void check_devices() const {
    if (may_take_host_tensors(schema_.name())) return;
    for (const auto& argument : arguments_) {
      for (const auto& operand : argument.operands) {
        TORCH_CHECK(!operand.is_defined || operand.is_on_device || operand.sizes.empty(),
                    "Expected all tensors to be on the same device, but ", schema_.name(),
                    " got one of the CPU of shape ", c10::IntArrayRef(operand.sizes));
      }
    }
  }

  bool returns_view() const {
    for (const auto& result : schema_.returns()) {
      if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    }
    return false;
  }

  bool has_new_results() const {
    for (const auto& result : schema_.returns()) {
      if (!is_written(result)) return true;
    }
    return false;
  }

  // `out=` tensors without elements take the shape of the result.
  bool has_empty_out() const {
    for (size_t i = 0; i < num_arguments_; i++) {
      if (schema_.arguments()[i].is_out() && arguments_[i].kind == Argument::kTensor &&
          arguments_[i].operands[0].is_defined && arguments_[i].operands[0].numel() == 0) {
        return true;
      }
    }
    return false;
  }

  bool needs_values() const {
    if (has_unknown_shapes(schema_.name())) return true;
    for (const auto& result : schema_.returns()) {
      const auto kind = result.type()->kind();
      if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
    }
    for (const auto& argument : arguments_) {  // indexing with a mask
      if (argument.kind != Argument::kOptionalTensors) continue;
      for (const auto& operand : argument.operands) {
        if (operand.is_defined &&
            (operand.dtype == c10::ScalarType::Bool || operand.dtype == c10::ScalarType::Byte)) {
          return true;
        }
      }
    }
    return false;
  }

  static torch::jit::Stack call_on_cpu(const c10::OperatorHandle& op,
                                       const std::vector<c10::IValue>& arguments) {
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op.callBoxed(&stack);
    return stack;
  }

  void run_at_once() {
    Races::the().launched(Streams::current(), schema_.name(), argument_accesses());
    host_waits_for_stream(Streams::current(), schema_.name());
    std::vector<c10::IValue> values;
    for (const auto& argument : with_generator()) {
      values.push_back(argument.with([](const Operand& operand) { return operand.in_kernel(); }));
    }
    auto results = call_on_cpu(op_, values);
    std::vector<c10::IValue> returned;
    for (size_t i = 0; i < results.size(); i++) {
      if (is_written(schema_.returns()[i])) {
        returned.push_back(argument_returned_as(i));
      } else if (results[i].isTensor()) {
        returned.push_back(results[i].toTensor().to(the_device(), /*non_blocking=*/true));
      } else {
        returned.push_back(results[i]);
      }
    }
    give(std::move(returned));
  }

  // A kernel draws from the generator's state when it was issued.
  std::vector<Argument> with_generator() const {
    auto arguments = arguments_;
    for (auto& argument : arguments) {
      if (argument.kind == Argument::kGenerator) {
        argument.value = next_generator(argument.value.toOptional<at::Generator>());
      }
    }
    return arguments;
  }

  Outcome outcome() const {
    static std::mutex mutex;
    static auto* known = new std::unordered_map<std::string, Outcome>();
    const std::string key = signature();
    {
      std::lock_guard<std::mutex> lock(mutex);
      auto found = known->find(key);
      if (found != known->end()) return found->second;
    }
    auto found = outcome_on_stand_ins();
    std::lock_guard<std::mutex> lock(mutex);
    if (known->size() > 20000) known->clear();
    known->emplace(key, found);
    return found;
  }

  std::string signature() const {
    std::ostringstream text;
    text << schema_.name() << '.' << schema_.overload_name();
    for (const auto& argument : arguments_) {
      text << '|' << argument.kind;
      if (argument.kind == Argument::kValue) text << argument.value;
      for (const auto& operand : argument.operands) {
        text << (operand.is_defined ? static_cast<int>(operand.dtype) : -1) << operand.is_on_device
             << c10::IntArrayRef(operand.sizes) << c10::IntArrayRef(operand.strides);
      }
    }
    return text.str();
  }

  Outcome outcome_on_stand_ins() const {
    // Zero is an index of any tensor; but integers can't be divided by it.
    const bool divides = schema_.name().find("div") != std::string::npos ||
                         schema_.name().find("mod") != std::string::npos ||
                         schema_.name().find("remainder") != std::string::npos;
    std::vector<c10::IValue> values;
    for (const auto& argument : arguments_) {
      if (argument.kind == Argument::kGenerator) {
        values.emplace_back(at::make_generator<at::CPUGeneratorImpl>());
      } else {
        values.push_back(argument.with(
            [&](const Operand& operand) { return operand.stand_in(divides ? 1 : 0); }));
      }
    }
    auto results = call_on_cpu(op_, values);
    Outcome found;
    for (size_t i = 0; i < num_arguments_; i++) {
      if (!schema_.arguments()[i].is_out() || arguments_[i].kind != Argument::kTensor) continue;
      auto sizes = values[i].toTensor().sizes().vec();
      if (sizes != arguments_[i].operands[0].sizes) found.resized[i] = sizes;
    }
    for (size_t i = 0; i < results.size(); i++) {
      if (is_written(schema_.returns()[i])) continue;
      found.results.emplace_back();
      found.are_lists.push_back(results[i].isTensorList());
      if (results[i].isTensorList()) {
        for (const auto& tensor : results[i].toTensorVector()) {
          found.results.back().emplace_back(tensor);
        }
      } else {
        found.results.back().emplace_back(results[i].toTensor());
      }
    }
    return found;
  }

  void issue(const Outcome& outcome) {
    for (const auto& [index, sizes] : outcome.resized) {
      auto tensor = given(index).toTensor();
      at::native::resize_(tensor, sizes, std::nullopt);
      arguments_[index] = Argument(tensor, schema_.arguments()[index]);
    }
    std::vector<c10::IValue> returned;
    std::vector<std::vector<Operand>> targets;  // of the results that are new
    std::vector<size_t> sources;                // their places among the results
    std::vector<Access> accesses = argument_accesses();
    size_t next = 0;
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      if (is_written(schema_.returns()[i])) {
        returned.push_back(argument_returned_as(i));
        continue;
      }
      std::vector<at::Tensor> made;
      for (const auto& layout : outcome.results[next]) made.push_back(layout.make());
      targets.emplace_back(made.begin(), made.end());
      sources.push_back(i);
      for (const auto& operand : targets.back()) accesses.push_back(operand.access(true));
      if (outcome.are_lists[next++]) {
        returned.emplace_back(made);
      } else {
        returned.emplace_back(made[0]);
      }
    }
    launch(Streams::current(), schema_.name(), accesses,
           [op = op_, arguments = with_generator(), targets, sources] {
             std::vector<c10::IValue> values;
             for (const auto& argument : arguments) {
               values.push_back(
                   argument.with([](const Operand& operand) { return operand.in_kernel(); }));
             }
             auto results = call_on_cpu(op, values);
             for (size_t i = 0; i < targets.size(); i++) store(targets[i], results[sources[i]]);
           });
    give(std::move(returned));
  }

  static void store(const std::vector<Operand>& targets, const c10::IValue& result) {
    const auto tensors = result.isTensorList() ? result.toTensorVector()
                                               : std::vector<at::Tensor>{result.toTensor()};
    for (size_t i = 0; i < targets.size(); i++) {
      if (targets[i].data) targets[i].in_kernel().copy_(tensors[i]);
    }
  }

  std::vector<Access> argument_accesses() const {
    std::vector<Access> accesses;
    for (size_t i = 0; i < num_arguments_; i++) {
      for (const auto& operand : arguments_[i].operands) {
        if (!operand.data) continue;
        accesses.push_back(operand.access(is_written(schema_.arguments()[i])));
      }
    }
    return accesses;
  }

  const c10::IValue& argument_returned_as(size_t result) const {
    const auto& wanted = schema_.returns()[result].alias_info()->beforeSets();
    for (size_t i = 0; i < num_arguments_; i++) {
      const auto& argument = schema_.arguments()[i];
      if (is_written(argument) && argument.alias_info()->beforeSets() == wanted) return given(i);
    }
    TORCH_INTERNAL_ASSERT(false, "no argument is returned by ", schema_.name());
  }

  void give(std::vector<c10::IValue> returned) {
    torch::jit::drop(stack_, num_arguments_);
    for (auto& value : returned) stack_.push_back(std::move(value));
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack& stack_;
  const size_t num_arguments_;
  std::vector<Argument> arguments_;
};

inline void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p,
                                                         std::optional<bool> is_training) {
  if (!is_training.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("native_dropout", native_dropout);
  // Composite, so that the fallback above does not see them.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
  // One launch for a list of tensors, as on CUDA; without a kernel they come one by one.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) != 0) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op) continue;
    const auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_kernel>());
  }
}

}  // namespace lag
