"""A launched run followed from outside: the rows that it writes, what the launcher says, its processes to strike at."""

import json
import os
import re
import threading
import time
from pathlib import Path

import launching

DETECTED = 15.0  # seconds within which the launcher has to notice
LIMIT = 120.0  # for everything that takes its time on a busy machine


def until(condition, what):
    launching.until(condition, what, LIMIT)


class Run:
    """A launcher with its program, which writes a row of JSON for every step to `path`."""

    def __init__(self, place, path, *arguments):
        self.place, self.path = place, path
        self.program = str(next(a for a in arguments if str(a).endswith(".py")))
        self.launcher = place.start(*arguments)
        self.said, self.out = [], []
        self.readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.launcher.stderr, self.said), (self.launcher.stdout, self.out))
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, stream, lines):
        for line in stream:
            lines.append((time.monotonic(), line.rstrip("\n")))

    def rows(self):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_rows(self, number):
        until(lambda: len(self.rows()) >= number or self.launcher.poll() is not None, f"{number} rows")
        assert self.launcher.poll() is None, self.said

    def heard(self, words):
        """How often the launcher said this."""
        return sum(words in line for _, line in self.said)

    def pid(self, process):
        """Of that process of the present attempt."""
        for pid in self.place.processes():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"HETJAX_PROCESS=%d" % process in environment and self.program.encode() in command:
                return pid
        raise AssertionError(f"there is no process {process}")

    def strike(self, process, number):
        """Send a signal; the seconds until the launcher says something about that process."""
        pid = self.pid(process)
        began = time.monotonic()
        os.kill(pid, number)
        named = re.compile(rf"\[launcher\] process {process} \(pid {pid}\)")
        told = lambda: any(named.search(line) for _, line in self.said)
        until(lambda: told() or self.launcher.poll() is not None, f"word of process {process}")
        assert told(), self.said
        return next(when for when, line in self.said if named.search(line)) - began

    def end(self):
        """The exit code, when everything was read."""
        code = self.launcher.wait(LIMIT)
        for reader in self.readers:
            reader.join(LIMIT)
        return code

    def kept(self):
        """The rows that count: of steps that were done again the last ones."""
        kept = {}
        for row in self.rows():
            kept[row["step"]] = row
        assert sorted(kept) == list(range(1, len(kept) + 1))
        return [kept[step] for step in sorted(kept)]
