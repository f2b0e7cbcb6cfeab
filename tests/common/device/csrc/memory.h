// Device memory, as a caching allocator sees it: a freed block goes back to the stream that it was
// allocated on, at once, and is handed out there again while others may still use it.
//
// Blocks are cached by their exact size: they are neither split nor joined.
#pragma once

namespace lag {

struct Block {
  char* data;
  size_t nbytes;
  StreamId home;                 // the stream that it was allocated on
  std::set<StreamId> recorded;   // by `record_stream`
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  static constexpr size_t kAlignment = 512;

  static DeviceMemory& the() {
    static auto* it = new DeviceMemory();
    return *it;
  }

  static size_t rounded(size_t nbytes) {
    return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &free_data, the_device()};
    const StreamId home = Streams::current();
    counts().allocations++;
    Block block{nullptr, rounded(nbytes), home, {}};
    bool is_reused = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      return_what_is_done();
      block.data = take_cached(home, block.nbytes);
      is_reused = block.data != nullptr;
      if (!is_reused) block.data = reserve(block.nbytes);
      live_[block.data] = block;
      increase(stats_.allocated_bytes, block.nbytes);
      increase(stats_.active_bytes, block.nbytes);
      increase(stats_.requested_bytes, nbytes);
      increase(stats_.allocation, 1);
      increase(stats_.active, 1);
    }
    Races::the().allocated(block.data, block.nbytes, home);
    if (settings().is_poisoning && is_reused) {
      // On the home stream: whoever else still uses the memory finds NaN there.
      const auto data = block.data;
      Streams::the().at(home).push([data, n = block.nbytes] { std::memset(data, 0xFF, n); });
    }
    return {block.data, block.data, &free_data, the_device()};
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(static_cast<char*>(data.get()));
    if (found != live_.end() && found->second.home != stream.id()) {
      found->second.recorded.insert(stream.id());
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stats : all_stats()) {
      for (auto& stat : *stats) stat.reset_accumulated();
    }
  }

  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stats : all_stats()) {
      for (auto& stat : *stats) stat.reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t reserved = stats_.reserved_bytes[0].current;
    return {kTotal - reserved, kTotal};
  }

  // The memory stays with the process: tasks that were issued may still use it.
  void emptyCache(c10::MempoolId_t) override {
    host_waits_for_all("empty_cache");
    std::lock_guard<std::mutex> lock(mutex_);
    return_what_is_done();
    for (auto& [key, blocks] : cached_) {
      for (char* data : blocks) {
        std::free(data);
        decrease(stats_.reserved_bytes, key.second);
        decrease(stats_.segment, 1);
      }
    }
    cached_.clear();
  }

  bool initialized() override { return true; }
  c10::DeleterFnPtr raw_deleter() const override { return &free_data; }
  void copy_data(void* target, const void* source, size_t nbytes) const override {
    Streams::the().at(Streams::current()).push([=] { std::memcpy(target, source, nbytes); });
  }

 private:
  using Stats = c10::CachingAllocator::StatArray;
  static constexpr size_t kTotal = size_t{64} << 30;

  // A block that other streams have used, as `record_stream` said, and their points at its end.
  struct Deferred {
    Block block;
    std::vector<PointPtr> points;
  };

  static void free_data(void* data) {
    if (data) the().free_block(static_cast<char*>(data));
  }

  void free_block(char* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(data);
    if (found == live_.end()) return;
    Block block = std::move(found->second);
    live_.erase(found);
    Races::the().freed(block.data, block.nbytes, block.home, block.recorded);
    decrease(stats_.allocated_bytes, block.nbytes);
    decrease(stats_.allocation, 1);
    if (block.recorded.empty()) {
      return_block(block);
      return;
    }
    Deferred deferred{block, {}};
    for (StreamId stream : block.recorded) deferred.points.push_back(record_point(stream));
    deferred_.push_back(std::move(deferred));
  }

  void return_what_is_done() {
    for (auto it = deferred_.begin(); it != deferred_.end();) {
      const bool is_done = std::all_of(it->points.begin(), it->points.end(),
                                       [](const PointPtr& point) { return point->is_reached(); });
      if (is_done) return_block(it->block);
      it = is_done ? deferred_.erase(it) : std::next(it);
    }
  }

  void return_block(const Block& block) {
    cached_[{block.home, block.nbytes}].push_back(block.data);
    decrease(stats_.active_bytes, block.nbytes);
    decrease(stats_.active, 1);
  }

  char* take_cached(StreamId home, size_t nbytes) {
    auto& cached = cached_[{home, nbytes}];
    if (cached.empty()) return nullptr;
    char* data = cached.back();
    cached.pop_back();
    counts().reuses++;
    return data;
  }

  char* reserve(size_t nbytes) {
    increase(stats_.reserved_bytes, nbytes);
    increase(stats_.segment, 1);
    stats_.num_device_alloc++;
    auto* data = static_cast<char*>(std::aligned_alloc(kAlignment, nbytes));
    TORCH_CHECK_WITH(OutOfMemoryError, data, "lag: no memory for ", nbytes, " bytes");
    if (settings().is_poisoning) std::memset(data, 0xFF, nbytes);
    return data;
  }

  static void increase(Stats& stats, size_t amount) { stats[0].increase(amount); }
  static void decrease(Stats& stats, size_t amount) { stats[0].decrease(amount); }
  std::vector<Stats*> all_stats() {
    return {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes,
            &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes};
  }

  std::mutex mutex_;
  std::unordered_map<char*, Block> live_;
  std::map<std::pair<StreamId, size_t>, std::vector<char*>> cached_;
  std::list<Deferred> deferred_;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

namespace {
const bool is_memory_registered = [] {
  c10::SetAllocator(kDevice, &DeviceMemory::the());
  return true;
}();
}  // namespace

inline void DeviceGuard::recordDataPtrOnStream(const c10::DataPtr& data,
                                               const c10::Stream& stream) const {
  DeviceMemory::the().recordStream(data, stream);
}

}  // namespace lag
