"""Files of every kind, changed at random so that they get past checksums: nothing may hang, crash, or take much memory.

    python tests/fuzz_files.py --files 10000              # of each kind of file, over all classes that have it
    python tests/fuzz_files.py --files 200 --only Memory  # of the classes whose names hold this
    python tests/fuzz_files.py --case Buffer.npz --start 17 --files 1 --each  # one again

A file is refused with a FileError that names it, and what it should be loaded into is as it was; or it is read, and
then everything can be done with it. The last line that is printed says how many files there were, and how many of them
were refused. Each class runs in a process of its own; what it does is a fault after two seconds of a processor's time,
or a minute.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

# Seconds of a processor's time, and of a clock where other programs run, too, that loading a file may take.
SECONDS, SECONDS_OF_A_CLOCK = 2.0, 300
# How many times its size a file may take in memory, and what it may take besides.
TIMES, SLACK = 4, 48 << 20


def say(text: str) -> None:
    """Prints at once: it is the last word if the process crashes."""
    print(text, flush=True)  # noqa: T201


class Peak:
    """How much more memory a process has had since `begin` than then; Linux tells."""

    def begin(self) -> None:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self._before = self._bytes("VmRSS")

    def end(self) -> int:
        return max(0, self._bytes("VmHWM") - self._before)

    def _bytes(self, name: str) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith(f"{name}:"))


class Fault(AssertionError):
    """Something that no file may do."""


def fuzz(name: str, start: int, n: int, folder: Path) -> tuple[int, int]:
    """Loads n changed files of a subject; returns how many there were, and how many were refused.

    Raises:
        Fault: one did what no file may do.
    """
    import fuzz_subjects
    import mutation_tables

    subject, suffix = fuzz_subjects.subjects()[name], f".{name.rpartition('.')[2]}"
    first, *_ = paths = subject.save(folder)
    whole = {path: path.read_bytes() for path in paths}
    os.mkfifo(first.parent / "pipe")
    subject.use(subject.load(subject.target(), first), first)  # what is imported or compiled then takes no file's time
    target = subject.target()
    before, n_refused, peak = subject.content(target), 0, Peak()
    for case in range(start, start + n):
        rng = random.Random(f"{name} {case}")
        changed = rng.choice(paths)
        change = rng.choice(mutation_tables.changes_of(changed, suffix))
        for path, data in whole.items():
            path.unlink(missing_ok=True)
            path.write_bytes(data)
        try:
            change(changed, rng)
        except Exception:  # what it came to is nothing that can be written
            changed.write_bytes(whole[changed][: rng.randrange(len(whole[changed]))])
        what = f"{name} {case}: {change.__qualname__.partition('.')[0]} of {changed.name}"
        size = sum(path.stat().st_size for path in paths if path.exists())
        faulthandler.dump_traceback_later(SECONDS_OF_A_CLOCK, exit=True)
        peak.begin()
        began = time.process_time()
        try:
            loaded = subject.load(target, first)
        except Exception as error:
            _check_refused(what, error, first, subject.content(target) == before)
            loaded, n_refused = None, n_refused + 1
        took, grown = time.process_time() - began, peak.end()
        faulthandler.cancel_dump_traceback_later()
        if took > SECONDS or grown > TIMES * size + SLACK:
            raise Fault(f"{what}: took {took:.1f} s and {grown:,} bytes for a file of {size:,}")
        if loaded is not None:
            _use(what, subject, loaded, first)
            target = subject.target()
    return n, n_refused


def _check_refused(what: str, error: Exception, first: Path, is_as_before: bool) -> None:
    from rlstructs import FileError

    named = str(error).startswith((str(first.parent), "load_state_dict: "))
    if not (isinstance(error, FileError) and named) and not isinstance(error, (FileNotFoundError, MemoryError)):
        raise Fault(f"{what}: {error!r} is no FileError that names the file") from error
    if isinstance(error, MemoryError) and "bytes are needed" not in str(error):
        raise Fault(f"{what}: {error!r}") from error
    if len(str(error)) > 3000 or not is_as_before:
        raise Fault(f"{what}: changed what it was not loaded into, or says too much: {str(error)[:300]}") from error


def _use(what: str, subject: Any, loaded: Any, first: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS_OF_A_CLOCK, exit=True)
    began = time.process_time()
    try:
        subject.use(loaded, first)
    except Exception as error:
        raise Fault(f"{what}: was read, and then: {error!r}") from error
    faulthandler.cancel_dump_traceback_later()
    if time.process_time() - began > SECONDS:
        raise Fault(f"{what}: was read, and then took more than {SECONDS} s")
    for left in (*first.parent.glob("again*"), *first.parent.glob("memories/again*")):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def child(name: str, start: int, n: int, keep_going: bool) -> int:
    """Runs the cases of one subject; prints faults, and how it went."""
    # Before other modules are imported, for numbers that are far apart are meant to be so.
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable()
    done = refused = faults = 0
    while done < n:
        with tempfile.TemporaryDirectory() as folder:
            try:
                some, no = fuzz(name, start + done, n - done, Path(folder))
                done, refused = done + some, refused + no
            except Fault as fault:
                say(f"FAULT {fault}")
                for line in traceback.format_exception(fault.__cause__)[-3:] if fault.__cause__ else ():
                    say(f"    {line.rstrip()[:600]}")
                faults += 1
                if not keep_going or faults == 20:
                    return 1
                done = int(str(fault).removeprefix(f"{name} ").partition(":")[0]) - start + 1
    say(f"{name}: {n} files, {refused} refused" + (f", {faults} faults" if faults else ""))
    return 1 if faults else 0


def names_by_kind(only: str) -> dict[str, list[str]]:
    """Kind of file -> the subjects that have it."""
    import fuzz_subjects

    kinds: dict[str, list[str]] = {}
    for name in fuzz_subjects.subjects():
        if only in name:
            kinds.setdefault(name.rpartition(".")[2], []).append(name)
    return kinds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000, help="how many of each kind")
    parser.add_argument("--only", default="", help="classes whose names hold this")
    parser.add_argument("--each", action="store_true", help="so many of each class, too")
    parser.add_argument("--start", type=int, default=0, help="the first case")
    parser.add_argument("--case", action="append", default=[], help="run this class in this process; may come again")
    parser.add_argument("--stop", action="store_true", help="stop at the first fault of a class")
    options = parser.parse_args()
    if options.case:
        return max(child(name, options.start, options.files, not options.stop) for name in options.case)
    n_files, failed, began = Counter[str](), list[str](), time.monotonic()
    for kind, names in names_by_kind(options.only).items():
        for at, name in enumerate(names):
            n = options.files if options.each else (options.files + at) // len(names)
            command = [sys.executable, __file__, "--case", name, "--start", str(options.start), "--files", str(n)]
            if subprocess.run([*command, *["--stop"] * options.stop]).returncode:
                failed.append(name)
            n_files[kind] += n
    counts = ", ".join(f"{n:,} {kind}" for kind, n in n_files.items())
    say(f"{counts} in {time.monotonic() - began:,.0f} s; faults in {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
