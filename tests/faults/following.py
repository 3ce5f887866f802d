"""Follows a launched run from outside: the rows it writes, the launcher's messages, signals to its processes."""

import json
import os
import re
import threading
from pathlib import Path

import launching

LIMIT = launching.LIMIT


def until(condition, what):
    launching.until(condition, what, LIMIT)


class Run:
    """A launcher whose program writes one row of JSON per step to `path`."""

    def __init__(self, sandbox, path, *arguments):
        self.sandbox, self.path = sandbox, path
        self.program = str(next(a for a in arguments if str(a).endswith(".py")))
        self.launcher = sandbox.start(*arguments)
        self.err, self.out = [], []
        self.readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.launcher.stderr, self.err), (self.launcher.stdout, self.out))
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, stream, lines):
        for line in stream:
            lines.append(line.rstrip("\n"))

    def rows(self):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for_rows(self, number):
        until(lambda: len(self.rows()) >= number or self.launcher.poll() is not None, f"{number} rows")
        assert self.launcher.poll() is None, self.err

    def messages(self, words):
        """The number of lines on stderr that contain these words."""
        return sum(words in line for line in self.err)

    def wait_for_restart(self, number=1):
        until(lambda: self.messages("restarting with") == number, "a restart")

    def send_signal(self, process, number):
        """Send a signal to a process and wait until the launcher reports that it is lost."""
        pid = self._pid(process)
        os.kill(pid, number)
        report = re.compile(rf"\[launcher\] process {process} \(pid {pid}\)")
        reported = lambda: any(report.search(line) for line in self.err)
        until(lambda: reported() or not any(reader.is_alive() for reader in self.readers), f"a report on {process}")
        assert reported(), self.err

    def _pid(self, process):
        """The pid of a process of the current attempt."""
        for pid in self.sandbox.processes():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"HETJAX_PROCESS=%d" % process in environment and self.program.encode() in command:
                return pid
        raise AssertionError(f"there is no process {process}")

    def end(self):
        """Wait for the end; returns the exit code."""
        code = self.launcher.wait(LIMIT)
        for reader in self.readers:
            reader.join(LIMIT)
        return code

    def final_rows(self):
        """One row per step: of repeated steps the last row."""
        final = {row["step"]: row for row in self.rows()}
        assert sorted(final) == list(range(1, len(final) + 1))
        return [final[step] for step in sorted(final)]
