"""The process that programs of tests are forked from, which has imported torch and the library: see `programs.py`."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import sys
import traceback
import types
import warnings

N_BYTES = 8  # of the length of a request


def serve(connection):
    """Answers requests with the pid of the new program; returns only in such a program, with its request."""
    while header := connection.recv(N_BYTES):
        data, fds, _, _ = socket.recv_fds(connection, 1, 3)
        missing = int.from_bytes(header, "little") - 1
        while missing:
            data += connection.recv(missing)
            missing = int.from_bytes(header, "little") - len(data)
        pid = fork_orphan()
        if not pid:
            connection.close()
            return pickle.loads(data), fds
        for fd in fds:
            os.close(fd)
        connection.sendall(pid.to_bytes(N_BYTES, "little"))
    sys.exit()


def fork_orphan():
    """Forks a process that the tests' process adopts, because its parent has ended; returns its pid, 0 in itself."""
    reads, writes = os.pipe()
    between = fork()
    if between:
        os.close(writes)
        with open(reads, "rb") as file:
            pid = int.from_bytes(file.read(), "little")
        os.waitpid(between, 0)
        return pid
    os.close(reads)
    between = os.getpid()
    pid = fork()
    if pid:
        os.write(writes, pid.to_bytes(N_BYTES, "little"))
        os._exit(0)
    os.close(writes)
    while os.getppid() == between:
        os.sched_yield()
    return 0


def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python says that there are threads: those of numpy, which expect it
        return os.fork()


def become(program, fds):
    """Gives this process what the program's own would have; returns its code."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    if program["start_new_session"]:
        os.setsid()
    os.chdir(program["cwd"] or ".")
    os.environ.clear()
    os.environ.update(program["env"])
    for option in program["warnings"]:
        sys.warnoptions.append(option)
        warnings.simplefilter(option)
    sys.argv[:] = program["argv"]
    sys.orig_argv[:] = [sys.executable, *program["argv"]]
    file = program["file"]
    sys.path[0] = os.path.dirname(os.path.realpath(file)) if file else ""
    if not file:
        return compile(program["text"], "<string>", "exec")
    with open(file, "rb") as source:
        return compile(source.read(), file, "exec")


def show(kind, error, trace):
    """Shows an exception that ends the program, without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def main():
    # What nearly all of them import, as every optimizer does torch._dynamo; nothing that starts threads.
    names = (
        "torch", "torch._dynamo", "gymnasium", "rlstructs.batcher.batcher", "rlstructs.envs.gym_env",
        "rlstructs.rollout.job",
    )  # fmt: skip
    for name in names:
        __import__(name)
    gc.freeze()  # it stays, so that no collection in a program need look at it
    program, fds = serve(socket.socket(fileno=int(sys.argv[1])))
    module = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __spec__=None)
    if program["file"]:
        module.__file__ = program["file"]
    code, sys.excepthook = become(program, fds), show
    sys.modules["__main__"] = module
    del program, fds
    exec(code, module.__dict__)


if __name__ == "__main__":
    main()
