// Modelled time: what each kernel, copy and collective would take, and when it would run.
//
// The times of a model are not slept but computed when something is issued: it starts once its
// stream is free, and not before the host has issued it; it ends after the time of the table. So a
// timeline is the same on an idle machine and on a busy one. Each rank has its own timeline: a
// collective does not wait for another rank's.
#pragma once

namespace lag {

struct Span {
  c10::StreamId stream;
  std::string name;
  double start_us, end_us;
};

// By the name of an operator or collective: a time for each call, and for each byte it touches.
struct Cost {
  double call_us = 0;
  double byte_us = 0;
};

// A moment of one model: those of earlier ones are over.
struct Moment {
  double us = 0;
  long model = 0;
};

class Timeline {
 public:
  static Timeline& the() {
    static auto* it = new Timeline();
    return *it;
  }

  void model(std::map<std::string, Cost> costs, double host_us) {
    std::lock_guard<std::mutex> lock(mutex_);
    costs_ = std::move(costs);
    host_us_ = host_us;
    is_modelled_ = !costs_.empty() || host_us > 0;
    free_at_.clear();
    host_at_ = 0;
    spans_.clear();
    number_++;
  }

  bool is_modelled() const { return is_modelled_; }

  void issue(c10::StreamId stream, const std::string& name, size_t nbytes) {
    if (!is_modelled_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    host_at_ += host_us_;
    auto found = costs_.find(name);
    if (found == costs_.end()) found = costs_.find("*");
    const Cost cost = found == costs_.end() ? Cost{} : found->second;
    const double start = std::max(free_at_[stream], host_at_);
    const double end = start + cost.call_us + cost.byte_us * static_cast<double>(nbytes);
    free_at_[stream] = end;
    spans_.push_back({stream, name, start, end});
  }

  Moment reached_at(c10::StreamId stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    return {std::max(free_at_[stream], host_at_), number_};
  }

  void delay_stream(c10::StreamId stream, const Moment& until) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (until.model == number_) free_at_[stream] = std::max(free_at_[stream], until.us);
  }

  void delay_host(const Moment& until) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (until.model == number_) host_at_ = std::max(host_at_, until.us);
  }

  double host_at() {
    std::lock_guard<std::mutex> lock(mutex_);
    return host_at_;
  }

  std::vector<Span> spans() {
    std::lock_guard<std::mutex> lock(mutex_);
    return spans_;
  }

 private:
  std::mutex mutex_;
  std::atomic<bool> is_modelled_{false};
  std::map<std::string, Cost> costs_;
  double host_us_ = 0, host_at_ = 0;
  long number_ = 0;
  std::map<c10::StreamId, double> free_at_;
  std::vector<Span> spans_;
};

}  // namespace lag
