"""What the tests share: the daemon of KVS_BUILD, and small geometry."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROTOCOL = ROOT / "proto" / "PROTOCOL.md"


def daemon_program() -> str:
    """Path of kvstrided; skips the test, with a reason, where there is none."""
    build = os.environ.get("KVS_BUILD")
    if not build:
        raise unittest.SkipTest("KVS_BUILD does not say where kvstrided is")
    program = os.path.join(build, "kvstrided")
    if not os.access(program, os.X_OK):
        raise unittest.SkipTest(f"{program} is not there")
    return program


class Daemon:
    """A daemon of its own in a folder of its own."""

    def __init__(self, *settings: str) -> None:
        program = daemon_program()
        self._folder = tempfile.TemporaryDirectory(prefix="kvs-python-")
        folder = self._folder.name
        self.socket, self.admin, self.metrics = f"{folder}/socket", f"{folder}/admin", f"{folder}/metrics"
        config = pathlib.Path(folder, "config.json")
        config.write_text("{}")
        self.log = pathlib.Path(folder, "log")
        command = [program, "--config", str(config), "--socket", self.socket, "--admin-socket", self.admin]
        for setting in ("pool.max_bytes=64MiB", f"metrics.path={self.metrics}", *settings):
            command += ["--set", setting]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        until = time.monotonic() + 30
        while "info ready" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > until:
                text = self.log.read_text()
                self.stop()
                raise AssertionError(f"kvstrided did not start: {text}")
            time.sleep(0.01)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; its exit status, negative for a signal."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        self._folder.cleanup()
        return status
