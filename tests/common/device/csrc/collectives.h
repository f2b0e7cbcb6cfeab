// Collectives as NCCL's: on a stream of the group's own, which waits for the one that issues them;
// waiting for a collective makes the current stream wait, not the host. Gloo moves the data, on the
// thread of the stream.
#pragma once

namespace lag {

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class CollectiveWork final : public c10d::Work {
 public:
  // Why the collective failed; null as long as it has not.
  struct Fate {
    std::mutex mutex;
    std::exception_ptr error;
  };

  CollectiveWork(c10d::OpType type, StreamId stream, Tensors tensors, Tensors outputs,
                 std::shared_ptr<Fate> fate)
      : c10d::Work(0, type),
        stream_(stream),
        done_(record_point(stream)),
        tensors_(std::move(tensors)),
        outputs_(std::move(outputs)),
        fate_(std::move(fate)) {}

  // As NCCL's watchdog: who drops the work without waiting must not get the memory back too early.
  ~CollectiveWork() override {
    for (const auto& tensor : tensors_) {
      if (tensor.device().type() != kDevice) continue;
      DeviceMemory::the().recordStream(tensor.storage().data_ptr(),
                                       c10::Stream(c10::Stream::UNSAFE, the_device(), stream_));
    }
  }

  const PointPtr& done() const { return done_; }
  bool isCompleted() override { return host_sees(done_); }
  bool isSuccess() const override { return error() == nullptr; }
  std::exception_ptr exception() const override { return error(); }
  Tensors result() override { return outputs_; }

  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

  void synchronize() override {
    if (auto failed = error()) std::rethrow_exception(failed);
    if (opType_ == c10d::OpType::BARRIER) {
      host_waits_for(done_, "barrier");
      if (auto failed = error()) std::rethrow_exception(failed);
    } else if (stream_ != Streams::current()) {
      stream_waits(Streams::current(), done_);
    }
    tensors_.clear();
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{the_device()});
    c10::OptionalStreamGuard on_stream(c10::Stream(c10::Stream::UNSAFE, the_device(), stream_));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

 private:
  std::exception_ptr error() const {
    std::lock_guard<std::mutex> lock(fate_->mutex);
    return fate_->error;
  }

  const StreamId stream_;
  const PointPtr done_;
  Tensors tensors_;  // kept until the work is waited for
  const Tensors outputs_;
  const std::shared_ptr<Fate> fate_;
};

class DeviceBackend final : public c10d::Backend {
 public:
  DeviceBackend(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
      : c10d::Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        name_(std::move(name)),
        stream_(Streams::the().take_for_group()) {}

  ~DeviceBackend() override { Streams::the().give_back(stream_); }

  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  bool supportsCoalescing() const override { return true; }
  uint64_t getSequenceNumberForGroup() override { return sequence_number_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const Operand operand(tensors[0]);
    return issue("broadcast", c10d::OpType::BROADCAST, options.asyncOp, {}, tensors,
                 [gloo = gloo_, operand, options] {
                   Tensors moved{as_bytes(operand.in_kernel())};
                   gloo->broadcast(moved, options)->wait();
                 });
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    const Operand operand(tensors[0]);
    return issue("all_reduce", c10d::OpType::ALLREDUCE, options.asyncOp, tensors, tensors,
                 [gloo = gloo_, operand, options] {
                   add_up(*gloo, operand.in_kernel(), options.reduceOp, options.timeout);
                 });
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Operand> operands(tensors.begin(), tensors.end());
    return issue("all_reduce", c10d::OpType::ALLREDUCE_COALESCED, options.asyncOp, tensors, tensors,
                 [gloo = gloo_, operands, options] {
                   for (const auto& operand : operands) {
                     add_up(*gloo, operand.in_kernel(), options.reduceOp, options.timeout);
                   }
                 });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const Operand operand(tensors[0]);
    return issue("reduce", c10d::OpType::REDUCE, options.asyncOp, tensors, tensors,
                 [gloo = gloo_, operand, options, is_root = options.rootRank == getRank()] {
                   auto sum = operand.in_kernel();
                   auto mine = sum.clone();
                   add_up(*gloo, mine, options.reduceOp, options.timeout);
                   if (is_root) sum.copy_(mine);
                 });
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override {
    std::vector<Operand> to(outputs.begin(), outputs.end()), from(inputs.begin(), inputs.end());
    return issue("all_gather", c10d::OpType::_ALLGATHER_BASE, options.asyncOp, inputs, outputs,
                 [gloo = gloo_, to, from, options] {
                   for (size_t i = 0; i < to.size(); i++) {
                     // The input may lie in the output.
                     auto all = as_bytes(to[i].in_kernel());
                     auto mine = as_bytes(from[i].in_kernel()).clone();
                     if (all.numel() > 0) gloo->_allgather_base(all, mine, options)->wait();
                   }
                 });
  }

  // Shards may differ in size, as NCCL allows: each rank's is broadcast.
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& options) override {
    std::vector<Operand> to(outputs[0].begin(), outputs[0].end());
    const Operand from(inputs[0]);
    return issue("all_gather", c10d::OpType::ALLGATHER, options.asyncOp, inputs, outputs[0],
                 [gloo = gloo_, to, from, timeout = options.timeout] {
                   auto mine = from.in_kernel().clone();
                   for (int rank = 0; rank < gloo->getSize(); rank++) {
                     auto part = to[rank].in_kernel();
                     if (rank == gloo->getRank()) part.copy_(mine.view_as(part));
                     broadcast_from(*gloo, rank, part, timeout);
                   }
                 });
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<Operand> to(outputs.begin(), outputs.end()), from(inputs.begin(), inputs.end());
    return issue("reduce_scatter", c10d::OpType::_REDUCE_SCATTER_BASE, options.asyncOp, inputs,
                 outputs, [gloo = gloo_, to, from, options] {
                   for (size_t i = 0; i < to.size(); i++) {
                     auto sum = from[i].in_kernel().clone();
                     add_up(*gloo, sum, options.reduceOp, options.timeout);
                     auto part = to[i].in_kernel();
                     part.copy_(sum.view({gloo->getSize(), -1})[gloo->getRank()].view_as(part));
                   }
                 });
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    const Operand to(outputs[0]);
    std::vector<Operand> from(inputs[0].begin(), inputs[0].end());
    return issue("reduce_scatter", c10d::OpType::REDUCE_SCATTER, options.asyncOp, inputs[0],
                 outputs, [gloo = gloo_, to, from, options] {
                   for (int rank = 0; rank < gloo->getSize(); rank++) {
                     auto sum = from[rank].in_kernel().clone();
                     add_up(*gloo, sum, options.reduceOp, options.timeout);
                     if (rank == gloo->getRank()) to.in_kernel().copy_(sum.view_as(to.in_kernel()));
                   }
                 });
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes,
                        const c10d::AllToAllOptions& options) override {
    const Operand to(output), from(input);
    return issue("all_to_all", c10d::OpType::ALLTOALL_BASE, options.asyncOp, {input}, {output},
                 [gloo = gloo_, to, from, output_sizes, input_sizes, options]() mutable {
                   auto received = to.in_kernel();
                   auto sent = from.in_kernel().clone();
                   gloo->alltoall_base(received, sent, output_sizes, input_sizes, options)->wait();
                 });
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs,
                   const c10d::AllToAllOptions& options) override {
    std::vector<Operand> to(outputs.begin(), outputs.end()), from(inputs.begin(), inputs.end());
    return issue("all_to_all", c10d::OpType::ALLTOALL, options.asyncOp, inputs, outputs,
                 [gloo = gloo_, to, from] {
                   std::vector<WorkPtr> sends;
                   for (int rank = 0; rank < gloo->getSize(); rank++) {
                     if (rank == gloo->getRank()) to[rank].in_kernel().copy_(from[rank].in_kernel());
                     else sends.push_back(send_to(*gloo, rank, from[rank].in_kernel(), kAllToAll));
                   }
                   for (int rank = 0; rank < gloo->getSize(); rank++) {
                     if (rank != gloo->getRank()) {
                       receive_from(*gloo, rank, to[rank].in_kernel(), kAllToAll);
                     }
                   }
                   for (const auto& send : sends) send->wait();
                 });
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    Tensors parts = outputs.empty() ? Tensors{} : outputs[0];
    std::vector<Operand> to(parts.begin(), parts.end());
    const Operand from(inputs[0]);
    return issue("gather", c10d::OpType::GATHER, options.asyncOp, inputs, parts,
                 [gloo = gloo_, to, from, root = static_cast<int>(options.rootRank)] {
                   if (gloo->getRank() != root) {
                     send_to(*gloo, root, from.in_kernel(), kGather)->wait();
                     return;
                   }
                   for (int rank = 0; rank < gloo->getSize(); rank++) {
                     if (rank == root) to[rank].in_kernel().copy_(from.in_kernel().clone());
                     else receive_from(*gloo, rank, to[rank].in_kernel(), kGather);
                   }
                 });
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    Tensors parts = inputs.empty() ? Tensors{} : inputs[0];
    std::vector<Operand> from(parts.begin(), parts.end());
    const Operand to(outputs[0]);
    return issue("scatter", c10d::OpType::SCATTER, options.asyncOp, parts, outputs,
                 [gloo = gloo_, to, from, root = static_cast<int>(options.rootRank)] {
                   if (gloo->getRank() != root) {
                     receive_from(*gloo, root, to.in_kernel(), kScatter);
                     return;
                   }
                   for (int rank = 0; rank < gloo->getSize(); rank++) {
                     if (rank == root) to.in_kernel().copy_(from[rank].in_kernel());
                     else send_to(*gloo, rank, from[rank].in_kernel(), kScatter)->wait();
                   }
                 });
  }

  // Two ranks may send to each other before either receives: nobody waits for a send.
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    const Operand from(tensors[0]);
    return issue("send", c10d::OpType::SEND, true, tensors, {}, [gloo = gloo_, from, rank, tag] {
      static auto* sent = new std::deque<WorkPtr>();
      static std::mutex mutex;
      std::lock_guard<std::mutex> lock(mutex);
      sent->push_back(send_to(*gloo, rank, from.in_kernel(), tag));
      while (!sent->empty() && sent->front()->isCompleted()) sent->pop_front();
    });
  }

  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    const Operand to(tensors[0]);
    return issue("recv", c10d::OpType::RECV, true, {}, tensors, [gloo = gloo_, to, rank, tag] {
      receive_from(*gloo, rank, to.in_kernel(), tag);
    });
  }

  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return issue("barrier", c10d::OpType::BARRIER, true, {}, {},
                 [gloo = gloo_, options] { gloo->barrier(options)->wait(); });
  }

 private:
  enum Tags : int { kAllToAll = 1 << 20, kGather, kScatter };

  WorkPtr issue(const std::string& name, c10d::OpType type, bool is_async, const Tensors& inputs,
                const Tensors& outputs, Task move) {
    sequence_number_++;
    // What is waited for at once runs on the current stream, as NCCL's does.
    const StreamId stream = is_async ? stream_ : Streams::current();
    if (is_async) stream_waits(stream, record_point(Streams::current()));
    // One after another in the order of the host, whatever their streams: ranks could meet in
    // different collectives else, and NCCL's share one communicator. Races do not count on it.
    if (last_ && last_stream_ != stream) {
      Timeline::the().delay_stream(stream, last_->modelled);
      Streams::the().at(stream).push([last = last_] { last->wait(); });
    }
    Tensors tensors = inputs;
    tensors.insert(tensors.end(), outputs.begin(), outputs.end());
    std::vector<Access> accesses;
    for (const auto& tensor : inputs) accesses.push_back(Operand(tensor).access(false));
    for (const auto& tensor : outputs) accesses.push_back(Operand(tensor).access(true));
    auto fate = std::make_shared<CollectiveWork::Fate>();
    launch(stream, name, accesses, [move = std::move(move), fate] {
      try {
        move();
      } catch (...) {
        std::lock_guard<std::mutex> lock(fate->mutex);
        fate->error = std::current_exception();
        throw;
      }
    });
    auto work =
        c10::make_intrusive<CollectiveWork>(type, stream, std::move(tensors), outputs, fate);
    last_ = work->done();
    last_stream_ = stream;
    return work;
  }

  // Gloo knows few dtypes; to move data it needs none.
  static at::Tensor as_bytes(const at::Tensor& tensor) {
    if (!tensor.is_contiguous() || tensor.numel() == 0) return tensor;
    return at::from_blob(tensor.data_ptr(), {static_cast<int64_t>(tensor.nbytes())},
                         at::TensorOptions().dtype(at::kByte));
  }

  static void add_up(c10d::Backend& gloo, at::Tensor tensor, const ReduceOp& how,
                     std::chrono::milliseconds timeout) {
    if (tensor.numel() == 0) return;
    c10d::AllreduceOptions options;
    const bool is_mean = how.op_ == ReduceOp::AVG;
    options.reduceOp = is_mean ? ReduceOp(ReduceOp::SUM) : how;
    options.timeout = timeout;
    Tensors tensors{tensor};
    gloo.allreduce(tensors, options)->wait();
    if (is_mean) tensor.div_(gloo.getSize());
  }

  static void broadcast_from(c10d::Backend& gloo, int rank, at::Tensor tensor,
                             std::chrono::milliseconds timeout) {
    if (tensor.numel() == 0) return;
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    options.timeout = timeout;
    Tensors moved{as_bytes(tensor)};
    gloo.broadcast(moved, options)->wait();
  }

  static WorkPtr send_to(c10d::Backend& gloo, int rank, const at::Tensor& tensor, int tag) {
    Tensors moved{tensor.clone(at::MemoryFormat::Contiguous).view(-1).view(at::kByte)};
    return gloo.send(moved, rank, tag);
  }

  static void receive_from(c10d::Backend& gloo, int rank, at::Tensor tensor, int tag) {
    auto bytes = at::empty({static_cast<int64_t>(tensor.nbytes())}, at::kByte);
    Tensors moved{bytes};
    gloo.recv(moved, rank, tag)->wait();
    if (tensor.numel() > 0) tensor.copy_(bytes.view(tensor.scalar_type()).view(tensor.sizes()));
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::string name_;
  const StreamId stream_;
  PointPtr last_;  // when the last collective is done
  StreamId last_stream_ = 0;
  std::atomic<uint64_t> sequence_number_{0};
};

}  // namespace lag
