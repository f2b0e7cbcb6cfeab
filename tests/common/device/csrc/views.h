// Operators that move no data: views, and what changes a tensor's storage or its form.
#pragma once

namespace lag {

inline at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size,
                             c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::make_optional(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

inline at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

inline at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size,
                                c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}

inline const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef symbolic,
                                std::optional<at::MemoryFormat>) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  const size_t numel = c10::multiply_integers(size);
  const size_t nbytes = (numel + self.storage_offset()) * self.itemsize();
  if (numel > 0 && self.storage().nbytes() < nbytes) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), nbytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

inline at::Tensor& set_storage_part(at::Tensor& self, at::Storage source, int64_t offset,
                                    c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_offset(offset);
  if (stride.size() == size.size()) {
    tensor->set_sizes_and_strides(size, stride);
  } else {  // none were given, as for the bytes of a storage
    tensor->set_sizes_contiguous(size);
  }
  return self;
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
  DeviceMemory::the().recordStream(self.storage().data_ptr(), stream);
}

// Lets `.data` of a tensor of the CPU become one of the device, and the other way round, as torch
// does for its own devices: `model.to("lag")` keeps the parameters' identity.
inline bool has_compatible_layout(const at::Tensor& self, const at::Tensor& from) {
  const auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == c10::kStrided &&
           !tensor.key_set().has(c10::DispatchKey::Python) &&
           (tensor.is_cpu() || tensor.device().type() == kDevice);
  };
  return (is_dense(self) && is_dense(from)) ||
         self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_part);
  m.impl("record_stream", record_stream);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_layout);
}

TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_has_compatible_shallow_copy_type", has_compatible_layout);
}

}  // namespace lag
