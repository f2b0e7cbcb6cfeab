// What torch asks of a device: the current stream, and events.
#pragma once

namespace lag {

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device(); }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_torch(Streams::current()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_torch(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_torch(Streams::the().from_pool());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return as_torch(Streams::the().from_pool());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_torch(std::exchange(Streams::current(), stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &Streams::the().at(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override {
    return host_sees(record_point(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits_for_stream(stream.id(), "stream.synchronize");
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    host_waits_for_all("device.synchronize");
  }

  // An event is a pointer to the point that it recorded last.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new PointPtr();
    point_of(*event) = record_point(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) stream_waits(stream.id(), point_of(event));
  }
  bool queryEvent(void* event) const override { return !event || host_sees(point_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits_for(point_of(event), "event.synchronize");
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<PointPtr*>(event);
  }
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end && queryEvent(start) && queryEvent(end),
                "lag: both events must be recorded and reached before their times are asked for");
    return (point_of(end)->time_us() - point_of(start)->time_us()) / 1000.0;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;

 private:
  static c10::Stream as_torch(StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, the_device(), id);
  }
  static PointPtr& point_of(void* event) { return *static_cast<PointPtr*>(event); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

}  // namespace lag
