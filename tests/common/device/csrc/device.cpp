// An accelerator made of threads, as a device of torch. One translation unit, because torch's
// headers take a compiler longer than all that is here.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/record_function.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>

// In the order in which they build on each other.
#include "settings.h"
#include "timeline.h"
#include "clocks.h"
#include "where.h"
#include "races.h"
#include "streams.h"
#include "guard.h"
#include "memory.h"
#include "host_memory.h"
#include "random.h"
#include "hooks.h"
#include "operands.h"
#include "kernels.h"
#include "views.h"
#include "copies.h"
#include "collectives.h"
#include "host_uses.h"
#include "autocast.h"

namespace {

using namespace lag;

void configure(const std::string& mode, long delay_us, bool is_poisoning, uint64_t seed) {
  static const std::map<std::string, Lateness> modes = {{"none", Lateness::kNone},
                                                        {"slow_side", Lateness::kSlowSide},
                                                        {"slow_compute", Lateness::kSlowCompute},
                                                        {"random", Lateness::kRandom}};
  const auto found = modes.find(mode);
  TORCH_CHECK_VALUE(found != modes.end(), "lag: no mode ", mode);
  settings().lateness = found->second;
  settings().delay_us = delay_us;
  settings().is_poisoning = is_poisoning;
  settings().seed = seed;
}

std::map<std::string, long> all_counts() {
  return {{"tasks", counts().tasks},
          {"waits", counts().waits},
          {"host_waits", counts().host_waits},
          {"allocations", counts().allocations},
          {"reuses", counts().reuses}};
}

void model(const std::map<std::string, std::pair<double, double>>& costs, double host_us) {
  std::map<std::string, Cost> table;
  for (const auto& [name, cost] : costs) table[name] = {cost.first, cost.second};
  Timeline::the().model(std::move(table), host_us);
}

std::vector<std::tuple<StreamId, std::string, double, double>> spans() {
  std::vector<std::tuple<StreamId, std::string, double, double>> found;
  for (const auto& span : Timeline::the().spans()) {
    found.emplace_back(span.stream, span.name, span.start_us, span.end_us);
  }
  return found;
}

// By use: the operator, the stream or -1 for the host, the line of Python, whether it writes.
using UseText = std::tuple<std::string, StreamId, std::string, bool>;

std::vector<std::tuple<UseText, UseText, size_t, bool>> races() {
  const auto as_text = [](const Past& past) {
    return UseText(past.use->name, past.use->stream, past.use->where.text(), past.is_write);
  };
  std::vector<std::tuple<UseText, UseText, size_t, bool>> found;
  for (const auto& race : Races::the().take()) {
    found.emplace_back(as_text(race.earlier), as_text(race.later), race.nbytes,
                       race.earlier.was_freed);
  }
  return found;
}

}  // namespace

// torch._C._set_storage_data_ptr_access_error_msg of builds with CUDA, and its undoing, which torch
// 2.11 does not have: neither is there then.
template <typename Storage>
void define_reads(pybind11::module& m) {
  if constexpr (requires(Storage* each) { each->clear_data_ptr_access_error_msg_(); }) {
    m.def("refuse_reads", [](size_t storage, std::string message) {
      reinterpret_cast<Storage*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(
          std::move(message));
    });
    m.def("allow_reads", [](size_t storage) {
      reinterpret_cast<Storage*>(storage)->clear_data_ptr_access_error_msg_();
    });
  }
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static auto* hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  m.def("configure", &configure);
  m.def("counts", &all_counts);
  m.def("synchronize", [] { host_waits_for_all("device.synchronize"); });
  m.def("take_host_waits", [] { return HostWaits::the().take(); });
  m.def("forbid_host_waits", [](bool is_forbidden) {
    return settings().is_host_wait_forbidden.exchange(is_forbidden);
  });
  m.def("detect_races", [](bool flag) { Races::the().detect(flag); });
  m.def("take_races", &races);
  m.def("model", &model);
  m.def("spans", &spans);
  m.def("host_time_us", [] { return Timeline::the().host_at(); });
  m.def("device_time_us", [] {
    double latest = 0;
    for (StreamId id = 0; id < Streams::the().num_streams(); id++) {
      latest = std::max(latest, Timeline::the().reached_at(id).us);
    }
    return latest;
  });
  define_reads<c10::StorageImpl>(m);
  m.def("default_generator", [] { return DeviceGenerator::the_default(); });
  pybind11::class_<DeviceBackend, c10d::Backend, c10::intrusive_ptr<DeviceBackend>>(m, "Backend")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Backend>, std::string>())
      .def("_set_default_timeout", &DeviceBackend::setTimeout);  // as NCCL's has
}
