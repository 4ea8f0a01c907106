"""Programs that tests start, without the seconds that each takes to import torch.

Within `quick_programs` a call of `subprocess.run` or `subprocess.Popen` that starts this Python with a text or a file
does not start Python anew: the program is forked from a server, which has imported torch and the library. It is this
process's child all the same, with a process id, a main module, standard streams and an end of its own. What a program
imports by itself, and how Python is started, is tested without it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

from folders import PYTHONPATH
from program_server import N_BYTES

PR_SET_CHILD_SUBREAPER = 36
# What may differ from the server's environment: programs read these, and neither Python nor a library as it is loaded.
FREE = {"SB3_LOGDIR", "PYTEST_CURRENT_TEST", "RLSTRUCTS_DEBUG"}
_libc = ctypes.CDLL(None)


class Server:
    """The server, which starts with the first program and ends with this process."""

    def __init__(self):
        self.env = usual_env()
        self.connection, other = socket.socketpair()
        with other:
            command = [sys.executable, str(Path(__file__).with_name("program_server.py")), str(other.fileno())]
            pipe = subprocess.PIPE  # what the programs' streams are too
            self.process = subprocess.Popen(command, env=self.env, stdin=pipe, stdout=pipe, pass_fds=[other.fileno()])
        atexit.register(self.close)

    def start(self, program, fds):
        """Starts a program; returns its pid, which is a child of this process."""
        data = pickle.dumps(program)
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            self.connection.sendall(len(data).to_bytes(N_BYTES, "little"))
            socket.send_fds(self.connection, [data[:1]], fds)
            self.connection.sendall(data[1:])
            return int.from_bytes(self.connection.recv(N_BYTES), "little")
        finally:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0)

    def close(self):
        self.connection.close()
        self.process.communicate()


def usual_env():
    """The environment that the fixture `subprocess_env` gives programs, but for what is `FREE`."""
    env = {name: value for name, value in os.environ.items() if name not in {*FREE, "PYTHONUNBUFFERED"}}
    return {**env, "PYTHONPATH": PYTHONPATH}


class Program(subprocess.Popen):
    """A `subprocess.Popen` of a program that the server starts."""

    server = None
    described = None  # the program; None for what is started as usual

    def __init__(self, args, **options):
        self.described = describe(args, options)
        super().__init__(args, **options)

    def _execute_child(self, *arguments):
        if self.described is None:
            return super()._execute_child(*arguments)
        pipes = arguments[10:16]
        if Program.server is None:
            Program.server = Server()
        stdin, stdout, stderr = (number if fd == -1 else fd for number, fd in enumerate((pipes[0], pipes[3], pipes[5])))
        self.pid = Program.server.start(self.described, [stdin, stdout, stderr])
        self._child_created = True
        self._close_pipe_fds(*pipes)
        return None


def describe(args, options):
    """What the server has to know of a program; None if it cannot be one that the server starts."""
    known = {"env", "cwd", "stdin", "stdout", "stderr", "text", "start_new_session", "bufsize", "encoding", "errors"}
    if not isinstance(args, list) or not options.keys() <= known or options.get("env") is None:
        return None
    executable, *rest = map(str, args)
    warnings = []
    while rest[:1] == ["-W"]:
        warnings, rest = [*warnings, rest[1]], rest[2:]
    is_text = rest[:1] == ["-c"]
    if executable != sys.executable or not rest or not (is_text or rest[0][:1] != "-"):
        return None
    if not set(warnings) <= {"ignore", "error"} or not fits(options["env"]):
        return None
    return {
        "argv": ["-c", *rest[2:]] if is_text else rest, "text": rest[1] if is_text else "",
        "file": "" if is_text else rest[0], "warnings": warnings, "env": dict(options["env"]),
        "cwd": options.get("cwd") and os.fspath(options["cwd"]), "start_new_session": options.get("start_new_session"),
    }  # fmt: skip


def fits(env):
    """Whether the server can start a program with this environment."""
    other = Program.server.env if Program.server else usual_env()
    return {name for name in env.keys() | other.keys() if env.get(name) != other.get(name)} <= FREE


@contextlib.contextmanager
def quick_programs():
    """Has the server start them; see the docstring of this module."""
    usual, subprocess.Popen = subprocess.Popen, Program
    try:
        yield
    finally:
        subprocess.Popen = usual
