// A race detector: two uses of the same bytes, of which one writes, must be ordered by waits.
//
// Nothing here depends on when tasks run. Whatever the host issues is compared with the last write
// of each byte and the reads since, by the clocks of streams: an earlier use that the later one's
// stream does not know to be over is a race.
//
// [Note: Races with freed memory]
// Freed memory goes back to the stream that it was allocated on, its home, and any later allocation
// there may get it. So what other streams may still do to it is owed by whatever is allocated there
// next, of any size and at any address, until the home stream has waited for it. And memory comes
// as its home stream leaves it: another stream uses it only after what was issued there before.
#pragma once

namespace lag {

// Bytes that a task reads or writes.
struct Access {
  const char* data;
  size_t nbytes;
  bool is_write;
};

// A task, or an operator of the host. The host has no stream, and what it does is over at once.
struct Use {
  StreamId stream;
  uint64_t time;
  std::string name;
  Where where;
};
using UsePtr = std::shared_ptr<const Use>;
constexpr StreamId kHost = -1;

struct Past {
  UsePtr use;
  bool is_write;
  bool was_freed;  // since: it was a use of other memory, that is
};

struct Race {
  Past earlier;
  Past later;
  const char* data;  // the first byte that both use
  size_t nbytes;
};

class Races {
 public:
  static Races& the() {
    static auto* it = new Races();
    return *it;
  }

  bool is_on() const { return is_on_; }
  void detect(bool flag) { is_on_ = flag; }

  std::vector<Race> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Race> taken;
    taken.swap(found_);
    reported_.clear();
    return taken;
  }

  // Waits

  // What is over when all is that was issued on a stream so far.
  VectorClock issued_on(StreamId stream) {
    if (!is_on_) return {};
    std::lock_guard<std::mutex> lock(mutex_);
    return order_.of_stream(stream);
  }

  void stream_waited(StreamId stream, const VectorClock& clock) {
    if (!is_on_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    order_.of_stream(stream).join(clock);
  }

  void host_waited(const VectorClock& clock) {
    if (!is_on_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    order_.host_waited(clock);
  }

  // Uses

  void launched(StreamId stream, const std::string& name, const std::vector<Access>& accesses) {
    if (!is_on_) return;
    const Where where = where_called();
    std::lock_guard<std::mutex> lock(mutex_);
    const auto time = order_.advance(stream);
    const auto use = std::make_shared<const Use>(Use{stream, time, name, where});
    for (const auto& access : accesses) {
      if (access.nbytes == 0) continue;
      compare(access, use, order_.of_stream(stream));
      note(access, use);
    }
  }

  // What the host does itself comes before all that it issues later: it need not be noted.
  void used_by_host(const std::string& name, const Access& access) {
    if (!is_on_) return;
    const auto use = std::make_shared<const Use>(Use{kHost, 0, name, where_called()});
    std::lock_guard<std::mutex> lock(mutex_);
    compare(access, use, order_.of_host());
  }

  // Memory

  void allocated(const char* data, size_t nbytes, StreamId home) {
    if (!is_on_) return;
    const Where where = where_called();
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& clock = order_.of_stream(home);
    const auto use = std::make_shared<const Use>(Use{home, clock.of(home), "allocation", where});
    Cell cell{data + nbytes, {{use, true, false}}};
    auto& owed = owed_[home];
    for (auto it = owed.begin(); it != owed.end();) {
      const bool is_over = is_known(*it->second.use, clock);
      if (!is_over) cell.pasts.push_back(it->second);
      it = is_over ? owed.erase(it) : std::next(it);
    }
    forget(data, nbytes);
    cells_.emplace(data, std::move(cell));
  }

  // The allocator itself waits for what was issued on the streams in `awaited`.
  void freed(const char* data, size_t nbytes, StreamId home, const std::set<StreamId>& awaited) {
    if (!is_on_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& clock = order_.of_stream(home);
    for (auto it = cells_.lower_bound(data); it != cells_.end() && it->first < data + nbytes; ++it) {
      for (const auto& past : it->second.pasts) {
        const StreamId stream = past.use->stream;
        if (is_known(*past.use, clock) || awaited.count(stream)) continue;
        auto& owed = owed_[home][stream];
        if (!owed.use || owed.use->time <= past.use->time) owed = {past.use, past.is_write, true};
      }
    }
    forget(data, nbytes);
  }

  // Host memory has no home.
  void freed_on_host(const char* data, size_t nbytes) {
    if (!is_on_) return;
    std::lock_guard<std::mutex> lock(mutex_);
    forget(data, nbytes);
  }

 private:
  // Bytes that were always used together: the last write, and the last read of each stream since.
  struct Cell {
    const char* end;
    std::vector<Past> pasts;
  };

  static bool is_known(const Use& earlier, const VectorClock& clock) {
    return earlier.time <= clock.of(earlier.stream);
  }

  void compare(const Access& access, const UsePtr& use, const VectorClock& clock) {
    const char* end = access.data + access.nbytes;
    auto it = cells_.upper_bound(access.data);
    if (it != cells_.begin()) --it;
    for (; it != cells_.end() && it->first < end; ++it) {
      const char* first = std::max(it->first, access.data);
      const char* last = std::min(it->second.end, end);
      if (first >= last) continue;
      for (const auto& past : it->second.pasts) {
        if (!access.is_write && !past.is_write) continue;
        if (!access.is_write && past.was_freed) continue;  // reads what nobody wrote
        if (!is_known(*past.use, clock)) report({past, {use, access.is_write, false}, first,
                                                 static_cast<size_t>(last - first)});
      }
    }
  }

  void note(const Access& access, const UsePtr& use) {
    const char* end = access.data + access.nbytes;
    cut(access.data);
    cut(end);
    if (access.is_write) {
      forget(access.data, access.nbytes);
      cells_.emplace(access.data, Cell{end, {{use, true, false}}});
      return;
    }
    const char* at = access.data;
    for (auto it = cells_.lower_bound(at); at < end; ++it) {
      if (it == cells_.end() || it->first > at) {  // never used before
        const char* next = it == cells_.end() ? end : std::min(it->first, end);
        it = cells_.emplace_hint(it, at, Cell{next, {}});
      }
      note_read(it->second.pasts, use);
      at = it->second.end;
    }
  }

  static void note_read(std::vector<Past>& pasts, const UsePtr& use) {
    for (auto& past : pasts) {
      if (!past.is_write && !past.was_freed && past.use->stream == use->stream) {
        past.use = use;
        return;
      }
    }
    pasts.push_back({use, false, false});
  }

  // Let a cell begin at an address that lies in one.
  void cut(const char* at) {
    auto it = cells_.lower_bound(at);
    if (it == cells_.begin()) return;
    --it;
    if (it->second.end <= at) return;
    Cell rest = it->second;
    it->second.end = at;
    cells_.emplace(at, std::move(rest));
  }

  void forget(const char* data, size_t nbytes) {
    cells_.erase(cells_.lower_bound(data), cells_.lower_bound(data + nbytes));
  }

  // Once for each pair of lines.
  void report(Race race) {
    const auto &a = *race.earlier.use, &b = *race.later.use;
    const auto key = std::make_tuple(a.name, a.where.code, a.where.line, b.name, b.where.code,
                                     b.where.line, a.stream, b.stream);
    if (reported_.insert(key).second) found_.push_back(std::move(race));
  }

  std::atomic<bool> is_on_{false};
  std::mutex mutex_;
  Order order_;
  std::map<const char*, Cell> cells_;                    // by the first byte
  std::map<StreamId, std::map<StreamId, Past>> owed_;    // by home, by who uses it: the last use
  std::vector<Race> found_;
  std::set<std::tuple<std::string, PyCodeObject*, int, std::string, PyCodeObject*, int, StreamId,
                      StreamId>> reported_;
};

}  // namespace lag
