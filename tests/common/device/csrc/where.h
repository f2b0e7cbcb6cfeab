// The line of Python that the host is at, outside of torch.
#pragma once

namespace lag {

struct Where {
  PyCodeObject* code = nullptr;  // kept for good, so that its address stands for it
  int line = 0;

  // Asks for the interpreter.
  std::string text() const {
    if (!code) return "no line of Python";  // autograd's own thread
    pybind11::gil_scoped_acquire held;
    pybind11::object of(reinterpret_cast<PyObject*>(code), true);
    return pybind11::str(of.attr("co_filename")).cast<std::string>() + ":" + std::to_string(line) +
           " in " + pybind11::str(of.attr("co_qualname")).cast<std::string>();
  }
};

// Whether a function is torch's or Python's own; with the interpreter held.
inline bool is_of_torch(PyCodeObject* code) {
  static auto* known = new std::unordered_map<PyCodeObject*, bool>();
  auto found = known->find(code);
  if (found == known->end()) {
    Py_INCREF(code);
    const std::string file = pybind11::str(code->co_filename);
    const bool is_torchs = file.find("/torch/") != std::string::npos ||
                           file.find("/contextlib.py") != std::string::npos || file[0] == '<';
    found = known->emplace(code, is_torchs).first;
  }
  return found->second;
}

inline Where where_called() {
  pybind11::gil_scoped_acquire held;
  auto* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  Where where;
  while (frame && !where.code) {
    auto* code = PyFrame_GetCode(frame);
    if (!is_of_torch(code)) where = {code, PyFrame_GetLineNumber(frame)};
    Py_DECREF(code);
    auto* caller = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = caller;
  }
  Py_XDECREF(frame);
  return where;
}

}  // namespace lag
