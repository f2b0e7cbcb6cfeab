// Pinned host memory: what is freed is reused only once the copies that used it are done.
#pragma once

namespace lag {

inline void watch_host_uses();  // from now on

class PinnedMemory final : public c10::Allocator {
 public:
  static PinnedMemory& the() {
    static auto* it = new PinnedMemory();
    return *it;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_data, c10::Device(c10::kCPU)};
    const size_t size = DeviceMemory::rounded(nbytes);
    auto* data = static_cast<char*>(std::aligned_alloc(DeviceMemory::kAlignment, size));
    TORCH_CHECK_WITH(OutOfMemoryError, data, "lag: no pinned memory for ", nbytes, " bytes");
    if (Races::the().is_on()) watch_host_uses();
    std::lock_guard<std::mutex> lock(mutex_);
    free_what_is_done();
    live_[data] = {size, {}};
    return {data, data, &free_data, c10::Device(c10::kCPU)};
  }

  bool contains(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(data) != live_.end();
  }

  // A copy that was issued on a stream uses the memory at this address.
  void note_copy(const void* data, StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = find(data);
    if (found != live_.end()) found->second.copies[stream] = record_point(stream);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_data; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    std::memcpy(target, source, nbytes);
  }

 private:
  struct Use {
    size_t nbytes;
    std::map<StreamId, PointPtr> copies;  // the last on each stream
  };
  using Live = std::map<const char*, Use>;

  static void free_data(void* data) {
    if (data) the().free_block(static_cast<char*>(data));
  }

  void free_block(char* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(data);
    if (found == live_.end()) return;
    freed_.emplace_back(data, std::move(found->second));
    live_.erase(found);
    free_what_is_done();
  }

  void free_what_is_done() {
    freed_.remove_if([](const auto& freed) {
      for (const auto& [stream, point] : freed.second.copies) {
        if (!point->is_reached()) return false;
      }
      Races::the().freed_on_host(freed.first, freed.second.nbytes);
      std::free(freed.first);
      return true;
    });
  }

  Live::iterator find(const void* data) {
    auto address = static_cast<const char*>(data);
    auto found = live_.upper_bound(address);
    if (found == live_.begin()) return live_.end();
    --found;
    return address < found->first + found->second.nbytes ? found : live_.end();
  }

  std::mutex mutex_;
  Live live_;
  std::list<std::pair<char*, Use>> freed_;
};

}  // namespace lag
