// How late the device is, what it counts, and which waits of the host it refuses.
#pragma once

namespace lag {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

inline c10::Device the_device() { return c10::Device(kDevice, 0); }

enum class Lateness : int { kNone, kSlowSide, kSlowCompute, kRandom };

struct Settings {
  std::atomic<Lateness> lateness{Lateness::kNone};
  std::atomic<long> delay_us{200};
  std::atomic<bool> is_poisoning{true};
  std::atomic<uint64_t> seed{0};
  std::atomic<bool> is_host_wait_forbidden{false};
};

struct Counts {
  std::atomic<long> tasks{0};        // kernels, copies and collectives that were issued
  std::atomic<long> waits{0};        // of a stream for another one
  std::atomic<long> host_waits{0};   // of the host for a stream
  std::atomic<long> allocations{0};
  std::atomic<long> reuses{0};       // allocations that got memory which had been freed
};

// Nothing here is ever destroyed: threads of streams still run when the process exits.
inline Settings& settings() {
  static auto* it = new Settings();
  return *it;
}

inline Counts& counts() {
  static auto* it = new Counts();
  return *it;
}

// The first error of a kernel or a collective since the last synchronisation.
class Failure {
 public:
  static Failure& the() {
    static auto* it = new Failure();
    return *it;
  }

  void note(const std::string& text) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (text_.empty()) text_ = text;
  }

  void raise_if_any() {
    std::string text;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      text.swap(text_);
    }
    TORCH_CHECK(text.empty(), "lag: what ran on a stream failed: ", text);
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

// How often the host has waited, by what for.
class HostWaits {
 public:
  static HostWaits& the() {
    static auto* it = new HostWaits();
    return *it;
  }

  void note(const std::string& kind) {
    counts().host_waits++;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      num_of_[kind]++;
    }
    TORCH_CHECK(!settings().is_host_wait_forbidden, "lag: the host waits: ", kind);
  }

  std::map<std::string, long> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::map<std::string, long> taken;
    taken.swap(num_of_);
    return taken;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, long> num_of_;
};

// Lets Python run while this thread waits for a stream, which may need the interpreter.
class WithoutInterpreter {
 public:
  WithoutInterpreter() {
    if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
  }
  ~WithoutInterpreter() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace lag
