// Streams are threads with queues; a point is what events record and what others wait for.
#pragma once

namespace lag {

using Clock = std::chrono::steady_clock;

// All that was issued on a stream before it was made.
class Point {
 public:
  void reach() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      is_reached_ = true;
      reached_ = Clock::now();
    }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return is_reached_; });
  }

  bool is_reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return is_reached_;
  }

  // In microseconds from an arbitrary start: modelled if there is a model, else measured.
  double time_us() {
    if (Timeline::the().is_modelled()) return modelled.us;
    return std::chrono::duration<double, std::micro>(reached_.time_since_epoch()).count();
  }

  Moment modelled;
  VectorClock clock;  // what is over when it is reached

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_reached_ = false;
  Clock::time_point reached_;
};

using PointPtr = std::shared_ptr<Point>;
using Task = std::function<void()>;

// The thread starts with the first task: a process may load the device and then fork.
class Queue {
 public:
  explicit Queue(StreamId id) : id_(id) {}

  void push(Task task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
      if (!is_running_) std::thread([this] { run(); }).detach();
      is_running_ = true;
    }
    changed_.notify_one();
  }

  static bool& is_thread_of_stream() {
    thread_local bool it = false;
    return it;
  }

 private:
  void run() {
    is_thread_of_stream() = true;
    // Kernels are called for the CPU, below whatever the calling thread of a user has switched on.
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    std::mt19937_64 random(settings().seed + 7919 * static_cast<uint64_t>(id_));
    while (true) {
      Task task = next();
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us(random)));
      try {
        task();
      } catch (const std::exception& error) {
        Failure::the().note(error.what());
      }
    }
  }

  Task next() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !tasks_.empty(); });
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    return task;
  }

  long delay_us(std::mt19937_64& random) const {
    const long delay = settings().delay_us;
    switch (settings().lateness) {
      case Lateness::kSlowSide:
        return id_ != 0 ? delay : 0;
      case Lateness::kSlowCompute:
        return id_ == 0 ? delay : 0;
      case Lateness::kRandom: {
        const auto draw = random() % 10;  // 6 of 10 at once, 3 a little late, 1 very late
        return draw < 6 ? 0 : draw < 9 ? delay / 4 : 2 * delay;
      }
      default:
        return 0;
    }
  }

  const StreamId id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool is_running_ = false;
};

// Stream 0 is the default one. As on CUDA a program gets new streams from a pool, in turn. Groups
// of ranks have streams of their own, which go back when a group ends.
class Streams {
 public:
  static constexpr StreamId kPoolSize = 32;

  static Streams& the() {
    static auto* it = new Streams();
    return *it;
  }

  Queue& at(StreamId id) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (static_cast<StreamId>(queues_.size()) <= id) {
      queues_.push_back(std::make_unique<Queue>(queues_.size()));
    }
    return *queues_[id];
  }

  StreamId from_pool() {
    std::lock_guard<std::mutex> lock(mutex_);
    return 1 + next_in_pool_++ % kPoolSize;
  }

  StreamId take_for_group() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (given_back_.empty()) return 1 + kPoolSize + num_for_groups_++;
    const StreamId id = given_back_.back();
    given_back_.pop_back();
    return id;
  }

  void give_back(StreamId id) {
    std::lock_guard<std::mutex> lock(mutex_);
    given_back_.push_back(id);
  }

  StreamId num_streams() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<StreamId>(queues_.size());
  }

  static StreamId& current() {
    thread_local StreamId id = 0;
    return id;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::vector<StreamId> given_back_;
  StreamId next_in_pool_ = 0, num_for_groups_ = 0;
};

inline PointPtr record_point(StreamId stream) {
  auto point = std::make_shared<Point>();
  point->modelled = Timeline::the().reached_at(stream);
  point->clock = Races::the().issued_on(stream);
  Streams::the().at(stream).push([point] { point->reach(); });
  return point;
}

inline void stream_waits(StreamId stream, const PointPtr& point) {
  counts().waits++;
  Timeline::the().delay_stream(stream, point->modelled);
  Races::the().stream_waited(stream, point->clock);
  Streams::the().at(stream).push([point] { point->wait(); });
}

// Whether it is reached; a program that has seen so may rely on it.
inline bool host_sees(const PointPtr& point) {
  const bool is_reached = point->is_reached();
  if (is_reached) Races::the().host_waited(point->clock);
  return is_reached;
}

inline void host_waits_for(const PointPtr& point, const std::string& kind) {
  HostWaits::the().note(kind);
  Timeline::the().delay_host(point->modelled);
  Races::the().host_waited(point->clock);
  {
    WithoutInterpreter released;
    point->wait();
  }
  Failure::the().raise_if_any();
}

inline void host_waits_for_stream(StreamId stream, const std::string& kind) {
  host_waits_for(record_point(stream), kind);
}

inline void host_waits_for_all(const std::string& kind) {
  std::vector<PointPtr> points;
  for (StreamId id = 0; id < Streams::the().num_streams(); id++) points.push_back(record_point(id));
  HostWaits::the().note(kind);
  {
    WithoutInterpreter released;
    for (const auto& point : points) {
      Timeline::the().delay_host(point->modelled);
      Races::the().host_waited(point->clock);
      point->wait();
    }
  }
  Failure::the().raise_if_any();
}

// Issue a kernel, copy or collective.
inline void launch(StreamId stream, const std::string& name, const std::vector<Access>& accesses,
                   Task task) {
  counts().tasks++;
  size_t nbytes = 0;
  for (const auto& access : accesses) nbytes += access.nbytes;
  Timeline::the().issue(stream, name, nbytes);
  Races::the().launched(stream, name, accesses);
  Streams::the().at(stream).push(std::move(task));
}

}  // namespace lag
