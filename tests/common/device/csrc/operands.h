// What a kernel is given: addresses and layouts. By the time it runs, the tensors may be gone.
#pragma once

namespace lag {

struct Operand {
  bool is_defined = false;
  bool is_on_device = false;
  char* data = nullptr;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
  at::Tensor on_cpu;  // of an operand that is not on the device

  Operand() = default;

  explicit Operand(const at::Tensor& tensor) : is_defined(tensor.defined()) {
    if (!is_defined) return;
    sizes = tensor.sizes().vec();
    strides = tensor.strides().vec();
    dtype = tensor.scalar_type();
    is_on_device = tensor.device().type() == kDevice;
    if (!is_on_device) {
      // A number that a kernel takes is copied when the kernel is issued, as CUDA does.
      on_cpu = tensor.dim() == 0 && tensor.is_cpu() ? tensor.detach().clone() : tensor.detach();
    } else if (tensor.numel() > 0) {
      auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      data = static_cast<char*>(storage->mutable_data()) +
             tensor.storage_offset() * tensor.itemsize();
    }
  }

  size_t numel() const {
    size_t product = 1;
    for (auto size : sizes) product *= size;
    return product;
  }

  // From the first byte to the last one, gaps between strides included.
  size_t span_nbytes() const {
    if (numel() == 0) return 0;
    size_t last = 0;
    for (size_t i = 0; i < sizes.size(); i++) last += (sizes[i] - 1) * strides[i];
    return (last + 1) * c10::elementSize(dtype);
  }

  Access access(bool is_write) const { return {data, span_nbytes(), is_write}; }

  // The device's memory as a tensor of the CPU: for kernels alone, on the thread of a stream.
  at::Tensor in_kernel() const {
    if (!is_defined || !is_on_device) return on_cpu;
    const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    if (!data) return at::empty_strided(sizes, strides, options);
    return at::from_blob(data, sizes, strides, options);
  }

  // A tensor of the CPU with this layout, to find out what an operator would return.
  at::Tensor stand_in(int value) const {
    if (!is_defined || !is_on_device) return on_cpu;
    auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    return at::empty_strided(sizes, strides, options).fill_(value);
  }
};

}  // namespace lag
