"""A machine of its own: a small system with a real systemd as PID 1, in a container.

Knows debootstrap, systemd-nspawn and nsenter.  Does not know the daemon.  Needs root.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time
from typing import Sequence

TOOLS = ("debootstrap", "systemd-nspawn", "nsenter")
PACKAGES = "systemd,systemd-sysv,dbus"


class NoMachine(Exception):
    """Why there is none, though all that it takes seemed to be here."""


def may_mount() -> bool:
    """A container without the right to mount boots nothing."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def missing() -> str:
    """Why no machine can be made here; "" if one can."""
    if os.geteuid() != 0:
        return "needs root"
    if not may_mount():
        return "needs the right to mount (CAP_SYS_ADMIN)"
    lacking = [t for t in TOOLS if shutil.which(t) is None]
    if "debootstrap" in lacking and os.environ.get("KVS_SYSTEMD_BASE"):
        lacking.remove("debootstrap")
    return f"needs {', '.join(lacking)} (packages debootstrap, systemd-container)" if lacking else ""


def codename() -> str:
    for line in pathlib.Path("/etc/os-release").read_text().splitlines():
        if line.startswith("VERSION_CODENAME="):
            return line.split("=", 1)[1].strip('"')
    return "bookworm"


def base_of(folder: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.environ.get("KVS_SYSTEMD_BASE") or folder / f"base-{codename()}")


def has_base(folder: pathlib.Path) -> bool:
    return (base_of(folder) / "usr").exists()


class Machine:
    """Made from a base system that is kept for the next time; `root` is thrown away at the end."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder.resolve()
        self.root = self.folder / "root"
        self.console = self.folder / "console.log"
        self.base = base_of(self.folder)
        self.process: subprocess.Popen[bytes] | None = None
        self.leader = 0

    def prepare(self, limit: float) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not has_base(self.folder):
            fresh = self.base.with_suffix(".new")
            if fresh.exists():  # of a run that was cut off: what it mounted comes first
                subprocess.run(["umount", str(fresh / "proc"), str(fresh / "sys")], stderr=subprocess.DEVNULL, check=False)
                subprocess.run(["rm", "-rf", "--one-file-system", str(fresh)], check=True)
            with open(self.folder / "debootstrap.log", "wb") as log:
                command = ["timeout", "-k", "10", str(limit), "debootstrap", "--variant=minbase", f"--include={PACKAGES}"]
                made = subprocess.run([*command, codename(), str(fresh)], stdout=log, stderr=log, check=False)
            if made.returncode == 124:
                raise NoMachine(f"no base system within {limit:.0f} s")
            if made.returncode != 0:
                raise NoMachine(f"debootstrap failed; see {log.name}")
            fresh.rename(self.base)
        self.remove()
        subprocess.run(["cp", "-a", "--reflink=auto", str(self.base), str(self.root)], check=True)

    def add_libraries(self, programs: Sequence[pathlib.Path]) -> None:
        """What the programs link to and the small system lacks."""
        to = self.root / "usr/local/lib"
        for program in programs:
            lines = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=True).stdout
            for line in lines.splitlines():
                name, arrow, rest = line.strip().partition(" => ")
                source = rest.split(" ")[0]
                if arrow and source.startswith("/") and not list(self.root.glob(f"usr/lib/**/{name}")):
                    shutil.copy2(source, to / name)
        subprocess.run(["chroot", str(self.root), "/sbin/ldconfig"], check=True)

    def boot(self, timeout: float = 60) -> None:
        command = ["systemd-nspawn", "-q", "-D", str(self.root), "--register=no", "--keep-unit", "--link-journal=no", "-b"]
        with open(self.console, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        end = time.monotonic() + timeout
        while time.monotonic() < end and self.process.poll() is None:
            children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            if children:
                self.leader = int(children[0])
                if self.run("systemctl", "is-system-running").stdout.strip() in ("running", "degraded"):
                    return
            time.sleep(0.1)
        raise NoMachine(f"no running system within {timeout:.0f} s; its console is {self.console}")

    def run(self, *command: str, timeout: float = 90, check: bool = False) -> subprocess.CompletedProcess[str]:
        """A command in the machine.  With `check`, what it said is in the error."""
        enter = ["nsenter", "-t", str(self.leader), "-a", "env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin", *command]
        done = subprocess.run(enter, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: exit {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done

    def path(self, inside: str) -> str:
        """A path in the running machine, its tmpfs included, as seen from here."""
        return f"/proc/{self.leader}/root{inside}"

    def host_pid(self, inside: int) -> int:
        """The number that a process of the machine has here."""
        for status in pathlib.Path("/proc").glob("[0-9]*/status"):
            try:
                text = status.read_text()
            except OSError:
                continue
            numbers = next((line.split()[1:] for line in text.splitlines() if line.startswith("NSpid:")), [])
            if len(numbers) > 1 and int(numbers[-1]) == inside and self._is_ours(int(numbers[0])):
                return int(numbers[0])
        raise AssertionError(f"no process {inside} in the machine")

    def _is_ours(self, pid: int) -> bool:
        try:
            return os.readlink(f"/proc/{pid}/ns/pid") == os.readlink(f"/proc/{self.leader}/ns/pid")
        except OSError:
            return False

    def stop(self) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.run("systemctl", "poweroff", "--force")
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None

    def remove(self) -> None:
        if self.root.exists():
            subprocess.run(["rm", "-rf", "--one-file-system", str(self.root)], check=True)
