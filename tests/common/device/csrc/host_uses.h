// What operators of the host do to pinned memory, for the race detector: copies may still use it.
//
// Torch calls back for each operator that the host runs. Reads past torch, as numpy's, are not seen.
#pragma once

namespace lag {

// Operators that have a kernel for the CPU, but neither read nor write values.
inline bool moves_no_data(const std::string& name) {
  static const std::set<std::string> names = {"aten::set_", "aten::resize_", "aten::is_set_to",
                                              "aten::record_stream", "aten::_resize_output_"};
  return names.count(name) > 0;
}

inline bool is_used_by_host(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {  // a view
    if (result.alias_info() && !result.alias_info()->isWrite()) return false;
  }
  // What is made of other operators uses no memory itself, but for copies.
  const auto op = c10::Dispatcher::singleton().findSchema(schema.operator_name());
  return op && (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || schema.name() == "aten::copy_");
}

inline std::unique_ptr<at::ObserverContext> see_operator(const at::RecordFunction& function) {
  if (Queue::is_thread_of_stream() || !Races::the().is_on()) return nullptr;
  if (moves_no_data(function.name())) return nullptr;
  struct Argument {
    at::Tensor tensor;
    size_t index;
  };
  std::vector<Argument> pinned;
  const auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size(); i++) {
    const auto tensors = inputs[i].isTensor()       ? Tensors{inputs[i].toTensor()}
                         : inputs[i].isTensorList() ? inputs[i].toTensorVector()
                                                    : Tensors{};
    for (const auto& tensor : tensors) {
      if (!tensor.defined()) continue;
      if (tensor.device().type() == kDevice) return nullptr;  // the device does it
      if (!tensor.is_cpu() || !tensor.has_storage() || tensor.numel() == 0) continue;
      if (PinnedMemory::the().contains(tensor.const_data_ptr())) pinned.push_back({tensor, i});
    }
  }
  if (pinned.empty()) return nullptr;
  const auto schema = function.operator_schema();
  if (!schema || !is_used_by_host(*schema)) return nullptr;
  for (const auto& [tensor, index] : pinned) {
    const auto* alias = schema->arguments()[index].alias_info();
    Races::the().used_by_host(schema->name(), HostSide(tensor).access(alias && alias->isWrite()));
  }
  return nullptr;
}

inline void watch_host_uses() {
  static const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(&see_operator)
                                                       .needsInputs(true)
                                                       .scopes({at::RecordScope::FUNCTION}));
  static_cast<void>(handle);
}

}  // namespace lag
