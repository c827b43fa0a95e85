"""Training as a user starts it, under torchrun: start, watch, kill without warning, see that nobody is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["Launch", "records"]

ENDS_WITHIN_SECONDS = 60
WAITS_SECONDS = 120
RUNS_SECONDS = 180
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Launch:
    """One start of `twinreel train`, as a context: nothing of it outlives that.

    All of its processes, also those that have lost their parent, are known by a word in their environment.
    """

    def __init__(self, folder, name, num_processes, *arguments, **environment):
        """Start it.

        Args:
            folder: where it runs; its stdout and stderr lie there as NAME.out and NAME.err.
            name: of this launch; no other has it.
            num_processes: how many torchrun starts; one is started without torchrun.
            arguments: of `twinreel train`.
            environment: beside the usual one.
        """
        self.name = name
        self.word = f"LAUNCH={folder / name}\0".encode()
        self.err, self.out = folder / f"{name}.err", folder / f"{name}.out"
        launcher = (*LAUNCHER, str(num_processes)) if num_processes > 1 else ()
        own = {"LAUNCH": str(folder / name), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        with self.err.open("w") as err, self.out.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, "-m", "twinreel", "train", *map(str, arguments)],
                cwd=folder,
                env=os.environ | own | environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        end = time.monotonic() + 10
        while self.members() and time.monotonic() < end:
            self.kill(self.members())
            time.sleep(0.02)
        self.process.wait(10)

    def __str__(self):
        return f"{self.name}, exit code {self.process.poll()}:\n{self.said()}"

    def said(self):
        """Its stderr so far."""
        return self.err.read_text(errors="replace")

    def first_step(self):
        """The step it went on from, or None while it has not said so."""
        found = re.search(r"from step (\d+)$", self.said(), re.MULTILINE)
        return None if found is None else int(found[1])

    def members(self):
        """Parent by process id, of all that are alive."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self.word in (entry / "environ").read_bytes():
                    stat = (entry / "stat").read_text()
                    state, parent = stat.rpartition(")")[2].split()[:2]
                    if state != "Z":
                        found[int(entry.name)] = int(parent)
            except OSError:  # it has just ended, or is not ours to look at
                continue
        return found

    def ranks(self, members=None):
        """Process ids of the training processes, by rank."""
        members = members or self.members()
        ranks = {_rank(pid): pid for pid, parent in members.items() if parent == self.process.pid}
        return [ranks[rank] for rank in sorted(ranks.keys() - {None})]

    def readers(self, members=None):
        """Process ids of the reader processes of all ranks: their children, or those of their fork servers."""
        members = members or self.members()
        ranks = self.ranks(members)
        children = {pid: _command(pid) for pid, parent in members.items() if parent in ranks}
        servers = {pid for pid, command in children.items() if "multiprocessing.forkserver" in command}
        forked = {pid for pid, command in children.items() if "multiprocessing" not in command}
        return sorted(forked | {pid for pid, parent in members.items() if parent in servers})

    def kill(self, pids):
        """SIGKILL for each that is still there."""
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def wait_for(self, condition):
        """What the condition returns once that is true, while the launch runs."""
        end = time.monotonic() + WAITS_SECONDS
        while not (found := condition()):
            assert self.process.poll() is None, f"it ended before what was waited for: {self}"
            assert time.monotonic() < end, f"waited too long for {self}"
            time.sleep(0.01)
        return found

    def exit_code(self, limit=RUNS_SECONDS):
        """That of a launch that is left to its end."""
        try:
            return self.process.wait(limit)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {limit} s: {sorted(self.members())} of {self}") from None

    def ended(self, limit=ENDS_WITHIN_SECONDS):
        """Wait until nobody of it is alive; seconds.

        Raises:
            AssertionError: somebody is, after `limit` seconds.
        """
        began = time.monotonic()
        while left := self.members():
            assert time.monotonic() - began < limit, f"alive after {limit} s: {sorted(left)} of {self}"
            time.sleep(0.02)
            self.process.poll()  # a zombie is gone only for who asks
        self.process.wait(10)
        return time.monotonic() - began


def _rank(pid):
    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(word.removeprefix(b"RANK=")) for word in words if word.startswith(b"RANK=")), None)


def records(run, kind):
    """The lines of this kind in metrics.jsonl, but for what depends on the clock; half a line at its end is no line."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    noisy = {"clips_per_second", "step_seconds", "data_seconds", "waiting_share", "memory_gb"}
    return [{key: line[key] for key in line.keys() - noisy} for line in lines if line["kind"] == kind]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
