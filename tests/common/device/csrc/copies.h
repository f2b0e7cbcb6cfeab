// Copies between the device and the host, and within the device.
#pragma once

namespace lag {

inline void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  const Operand from(source), to(target);
  launch(Streams::current(), "copy", {from.access(false), to.access(true)},
         [from, to] { to.in_kernel().copy_(from.in_kernel()); });
}

// The part of a copy that is on the host: an address, which may be used until the copy is done.
struct HostSide {
  char* data;
  std::vector<int64_t> sizes, strides;
  c10::ScalarType dtype;

  explicit HostSide(const at::Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        dtype(tensor.scalar_type()) {}

  size_t span_nbytes() const {
    return at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype));
  }

  Access access(bool is_write) const { return {data, span_nbytes(), is_write}; }

  at::Tensor in_kernel() const {
    return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype));
  }
};

inline void copy_from_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const Operand to(target);
  const auto stream = Streams::current();
  if (PinnedMemory::the().contains(source.data_ptr())) {
    const HostSide from(source);
    launch(stream, "copy_from_host", {from.access(false), to.access(true)},
           [from, to] { to.in_kernel().copy_(from.in_kernel()); });
    PinnedMemory::the().note_copy(from.data, stream);
  } else {
    // As CUDA stages what is not pinned: the source may be written once the call returns.
    launch(stream, "copy_from_host", {to.access(true)},
           [staged = source.detach().clone(), to] { to.in_kernel().copy_(staged); });
  }
  if (!non_blocking) host_waits_for_stream(stream, "copy to the device");
}

inline void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const Operand from(source);
  const HostSide to(target);
  const auto stream = Streams::current();
  const bool is_pinned = PinnedMemory::the().contains(to.data);
  std::vector<Access> accesses{from.access(false)};
  if (is_pinned) accesses.push_back(to.access(true));
  launch(stream, "copy_to_host", accesses,
         [from, to] { to.in_kernel().copy_(from.in_kernel()); });
  if (is_pinned) PinnedMemory::the().note_copy(to.data, stream);
  if (!non_blocking || !is_pinned) host_waits_for_stream(stream, "copy to the host");
}

inline at::Tensor copy_from(const at::Tensor& given, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  TORCH_CHECK(given.layout() == c10::kStrided && target.layout() == c10::kStrided,
              "lag: only dense tensors are copied");
  const auto source = given.resolve_conj().resolve_neg().expand(target.sizes());
  if (source.is_cpu()) {
    copy_from_host(source, target, non_blocking);
  } else if (target.is_cpu()) {
    copy_to_host(source, target, non_blocking);
  } else {
    copy_on_device(source, target);
  }
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::native::resize_(target, source.sizes(), std::nullopt);
  return copy_from(source, target, false);
}

inline at::Scalar local_scalar(const at::Tensor& self) {
  const Operand operand(self);
  Races::the().launched(Streams::current(), "item", {operand.access(false)});
  host_waits_for_stream(Streams::current(), "item");
  return operand.in_kernel().item();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
}

}  // namespace lag
