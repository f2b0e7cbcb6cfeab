// A generator of the device's own: a seed, and an offset that each kernel advances when issued.
#pragma once

namespace lag {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator()
      : c10::GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  // As on CUDA: the bytes of the seed, then those of the offset.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const uint64_t state[] = {seed_, offset_};
    auto bytes = at::empty({sizeof(state)}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(bytes.mutable_data_ptr(), state, sizeof(state));
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& bytes) override {
    uint64_t state[2];
    TORCH_CHECK(bytes.numel() == sizeof(state) && bytes.dtype_initialized() &&
                    bytes.dtype().itemsize() == 1 && bytes.is_cpu(),
                "lag: expected a state of ", sizeof(state), " bytes on the CPU");
    std::memcpy(state, bytes.data(), sizeof(state));
    seed_ = state[0];
    offset_ = state[1];
  }

  // What one kernel draws from.
  at::Generator next() {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t mixed = (seed_ ^ (0x9E3779B97F4A7C15ull * ++offset_)) * 0xBF58476D1CE4E5B9ull;
    return at::make_generator<at::CPUGeneratorImpl>(mixed ^ (mixed >> 31));
  }

  static const at::Generator& the_default() {
    static auto* it = new at::Generator(at::make_generator<DeviceGenerator>());
    return *it;
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator();
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

inline at::Generator next_generator(const std::optional<at::Generator>& given) {
  const auto& generator = given && given->defined() ? *given : DeviceGenerator::the_default();
  auto* impl = dynamic_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl, "lag: expected a generator of this device, got one of ", generator.device());
  return impl->next();
}

}  // namespace lag
