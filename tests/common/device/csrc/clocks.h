// Vector clocks: who knows that which tasks are over.
#pragma once

namespace lag {

using c10::StreamId;

// By stream: how many of its tasks are over.
class VectorClock {
 public:
  uint64_t of(StreamId stream) const {
    return static_cast<size_t>(stream) < times_.size() ? times_[stream] : 0;
  }

  void raise(StreamId stream, uint64_t time) {
    if (static_cast<size_t>(stream) >= times_.size()) times_.resize(stream + 1);
    times_[stream] = std::max(times_[stream], time);
  }

  void join(const VectorClock& other) {
    for (size_t stream = 0; stream < other.times_.size(); stream++) {
      raise(stream, other.times_[stream]);
    }
  }

 private:
  std::vector<uint64_t> times_;
};

// What each stream's next task comes after. All threads of the host count as one: it issues a task
// after whatever it has waited for.
class Order {
 public:
  VectorClock& of_stream(StreamId stream) {
    auto& clock = streams_[stream];
    clock.join(host_);
    return clock;
  }

  // A new task's time on its stream.
  uint64_t advance(StreamId stream) {
    auto& clock = of_stream(stream);
    const uint64_t time = clock.of(stream) + 1;
    clock.raise(stream, time);
    return time;
  }

  const VectorClock& of_host() const { return host_; }
  void host_waited(const VectorClock& clock) { host_.join(clock); }

 private:
  std::map<StreamId, VectorClock> streams_;
  VectorClock host_;
};

}  // namespace lag
