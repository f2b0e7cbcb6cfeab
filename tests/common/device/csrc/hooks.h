// What torch asks of an accelerator beside streams: pinned memory, generators, resized storages.
#pragma once

namespace lag {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Device getDeviceFromPtr(void*) const override { return the_device(); }

  bool isPinnedPtr(const void* data) const override { return PinnedMemory::the().contains(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::the(); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return DeviceGenerator::the_default();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto memory = DeviceMemory::the().allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept > 0) {
      auto* to = static_cast<char*>(memory.get());
      const auto* from = static_cast<const char*>(storage.data());
      launch(Streams::current(), "resize", {{to, kept, true}, {from, kept, false}},
             [=] { std::memcpy(to, from, kept); });
    }
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(nbytes);
  }
};

}  // namespace lag
