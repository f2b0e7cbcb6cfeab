"""Processes that start at once: forks of a server, which has imported what they need.

[Note: Neighbours have different servers]
Importing torch and what uses it takes a process seconds, forking one that has done so takes
milliseconds. A fork inherits the seed of string hashes and the addresses of what was there before.
Ranks of a real job share neither, and code that depends on the order of a set must fail here as it
would there. So the processes of neighbouring ranks are forked from different servers. A server for
each rank would take three more seconds for the third and for the fourth, in each process of pytest.

Forking is safe because a server runs one thread, and of torch nothing but imports.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from typing import IO, Any

POLL_S = 0.005
_MAX_MESSAGE_NBYTES = 1 << 16


class ForkServer:
    """The parent's side of one server, which starts when it is asked to, and again if it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._output = ""  # of the server that was killed last

    def start(self, code: str, spec: dict[str, Any], env: dict[str, str]) -> None:
        """Start the server unless it runs: `code`, whose argument is `spec` and a socket "fd".

        Does not wait until the server has imported anything: `fork` does.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        self._socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by kill()
        spec = {**spec, "fd": theirs.fileno(), "parent": os.getpid()}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env=env,
                start_new_session=True,  # Ctrl-C is the parent's
            )

    def fork(self, connection: int, log: int, timeout: float) -> ForkedProcess:
        """Return a new process, which gets the first descriptor, and the second as its output.

        Raises:
            RuntimeError: The server gave no answer within `timeout` seconds; it is killed.
        """
        try:
            return ForkedProcess(self, self.ask("fork", 0, [connection, log], timeout))
        except OSError as error:
            raise RuntimeError(f"the fork server gave no answer:\n{self._output}") from error

    def ask(self, what: str, pid: int, fds: list[int], timeout: float) -> Any:
        """Send a request, with copies of `fds`; return the answer."""
        if self._socket is None:
            raise ConnectionResetError("the fork server has been killed")
        try:
            self._socket.settimeout(timeout)
            socket.send_fds(self._socket, [json.dumps([what, pid]).encode()], fds)
            answer = self._socket.recv(_MAX_MESSAGE_NBYTES)
            if not answer:
                raise ConnectionResetError("the fork server has died")
            return json.loads(answer)
        except BaseException:
            # Also for the test's own deadline: the answer may be outstanding.
            self.kill()
            raise

    def kill(self) -> None:
        """End the server, and on Linux its forks with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._socket is not None:
            self._socket.close()
        if self._log is not None:
            self._log.seek(0)
            self._output = self._log.read().decode(errors="replace")
            self._log.close()
        self._process = self._socket = self._log = None


class ForkedProcess:
    """What `subprocess.Popen` offers, for a process that is not this one's child."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        if self.returncode is None:
            try:
                self.returncode = self._server.ask("poll", self.pid, [], timeout=10.0)
            except OSError:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
                self.returncode = -signal.SIGKILL  # it ends with its server
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raise `subprocess.TimeoutExpired` if there is none in time."""
        deadline = time.monotonic() + timeout if timeout is not None else None
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


def serve(requests: socket.socket) -> int:
    """Answer requests, each by one message, until there are no more; return in the forks only.

    A fork leads a process group of its own, and gets the descriptor that is returned.
    """
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_NBYTES, 2)
        if not message:
            os._exit(0)
        what, pid = json.loads(message)
        answer: int | None
        if what == "poll":
            done, status = os.waitpid(pid, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if done else None
        elif (answer := os.fork()) == 0:
            os.setpgid(0, 0)
            requests.close()
            connection, log = fds
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            return connection
        else:
            with suppress(OSError):  # both do it, so that it is done whoever goes first
                os.setpgid(answer, answer)
        for fd in fds:
            os.close(fd)
        requests.sendall(json.dumps(answer).encode())
