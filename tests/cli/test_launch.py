"""Processes: started, joined, stopped, and taken down by the first that fails."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousParameters

from functron import checkpoint, tree
from functron.cli import launch, main, process
from functron.data import IndexedWriter
from functron.spmd import Mesh
from functron.training.config import configure, with_model
from functron.training.run import Run, prepare

pytestmark = pytest.mark.distributed

TRAIN = ["train", "--model", "llama3-tiny", "--seq", "16", "--mesh", "dp=3", "--global-batch", "6"]
TRAIN += ["--data", __file__]

# The command line, but rank 1 comes to grief making the third step's batch, ahead of its steps.
FAILING = """
import os, sys, torch.distributed as dist
from functron.cli.main import main
from functron.training.run import Run
real = Run.host_batch
def host_batch(run, step):
    if step == 2 and dist.get_rank() == 1:
        {fault}
    return real(run, step)
Run.host_batch = host_batch
sys.exit(main({arguments}))
"""

ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(Path(__file__).parent.parent.parent), os.environ.get("PYTHONPATH")])
    ),
}

# without looking for garbage in what is imported, as `functron` does
START = (
    "import gc, sys; gc.disable(); from functron.cli import launch; gc.freeze(); "
    "sys.exit(launch.launch({nproc}, sys.argv[1:]))"
)


def start(script: Path, nproc: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START.format(nproc=nproc), str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=ENV)


@pytest.mark.full  # as a failing stage in tests/pipeline/test_processes.py
def test_a_failing_rank_takes_the_job_down_with_its_traceback_first(tmp_path):
    script = tmp_path / "failing.py"
    fault = "raise RuntimeError('injected ' + 'fault')"
    arguments = [*TRAIN, "--mesh", "dp=2", "--out", str(tmp_path / "r")]
    script.write_text(FAILING.format(fault=fault, arguments=arguments))
    done = start(script, 2)
    assert done.returncode == 1
    errors = done.stderr[done.stderr.index("Traceback") :].rstrip().splitlines()
    assert done.stderr.count("Traceback") == 1
    assert "RuntimeError: injected fault" in errors
    assert errors[-1] == "functron: rank 1 failed first (exit code 1); all 2 processes were stopped"
    written = (tmp_path / "r" / "metrics.jsonl").stat().st_mtime
    assert time.time() - written < 30  # two steps were recorded; then it did not hang
    assert not (tmp_path / "r" / "checkpoints").exists()


def died(rank: int, exitcode: int, seconds: float, record: Path | None = None) -> ProcessFailure:
    """A failure as torch's launcher reports it: seen at `seconds`, with what the process left."""
    if record:
        info = {"py_callstack": "", "timestamp": str(int(seconds)), "time": seconds}
        record.write_text(json.dumps({"message": {"message": "an error", "extraInfo": info}}))
    failure = ProcessFailure(rank, 100 + rank, exitcode, str(record or "none"))
    failure.timestamp = int(seconds)
    return failure


def test_the_first_failure_is_not_a_process_that_the_launcher_stopped(tmp_path):
    def first(*failures: ProcessFailure) -> int:
        by_rank = {failure.local_rank: failure for failure in failures}
        return launch.first_failure(ChildFailedError("program", by_rank))[0]

    complained = died(1, 1, 100.8, tmp_path / "1")
    later = died(2, 1, 100.9, tmp_path / "2")
    assert first(died(0, -signal.SIGTERM, 101), complained, later) == 1
    assert first(died(0, -signal.SIGKILL, 101), complained, later) == 0
    assert first(died(0, -signal.SIGTERM, 101), died(1, -signal.SIGTERM, 100)) == 1


@pytest.mark.full  # as one that is killed during a save, below, and the choice between them above
def test_a_killed_rank_takes_the_job_down(tmp_path):
    script = tmp_path / "failing.py"
    fault = "os.kill(os.getpid(), 9)"
    script.write_text(FAILING.format(fault=fault, arguments=[*TRAIN, "--out", str(tmp_path / "r")]))
    done = start(script, 3)
    assert done.returncode == 128 + 9
    assert "functron: rank 1 failed first (killed by SIGKILL)" in done.stderr


DYING = """
import gc, os, sys, time
gc.disable()
from functron.cli.main import main
from functron.checkpoint import saver
import functron.cli.train
gc.freeze()
real = saver.write_pieces
def write(folder, division, source, **settings):
    if division.placement.here == 1:
        open({mark!r}, "w").close()
        os.kill(os.getpid(), 9)
    return real(folder, division, source, **settings)
saver.write_pieces = write
sys.exit(main({arguments}))
"""


def test_a_rank_killed_during_a_save_ends_the_job_soon(tmp_path):
    """Rank 0 waits for its part of the save, and for no rank that is dead once it is to end."""
    script, mark = tmp_path / "dying.py", tmp_path / "mark"
    arguments = [*TRAIN, "--mesh", "dp=2", "--steps", "1", "--out", str(tmp_path / "r")]
    script.write_text(DYING.format(mark=str(mark), arguments=arguments))
    done = start(script, 2)
    seconds = time.time() - mark.stat().st_mtime
    assert done.returncode == 128 + 9
    assert "functron: rank 1 failed first (killed by SIGKILL)" in done.stderr
    assert seconds < 20  # 31 where nothing but the launcher's SIGKILL ends it


@pytest.mark.full
@pytest.mark.applications("guard")  # which watches otherwise
def test_a_rank_that_hangs_ends_the_job_after_the_timeout_where_nothing_watches(torchrun, tmp_path):
    script = tmp_path / "failing.py"
    fault = "import time; time.sleep(600)"
    arguments = [*TRAIN, "--mesh", "dp=2", "--prefetch", "0", "--timeout-seconds", "4"]
    arguments += ["--hang-after", "0", "--out", str(tmp_path / "r")]
    script.write_text(FAILING.format(fault=fault, arguments=arguments))
    done = torchrun(script, 2, check=False)
    assert done.returncode == 1
    assert re.search(r"rank 1 did not come to \w+ of [\d,]+ x \w+ for 4 s", done.stderr)


SMALL = [*TRAIN[:5], "--steps", "4", "--device", "cpu"]


@pytest.fixture
def at_step(monkeypatch):
    """`at_step(2, fn)` has `fn()` called before the batch of step 2 is made."""

    def arrange(step, fn):
        real = Run.host_batch

        def host_batch(run, index):
            if index == step:
                fn()
            return real(run, index)

        monkeypatch.setattr(Run, "host_batch", host_batch)

    return arrange


def told(capsys, code, arguments):
    """The output of a run that fails so: a message, and no traceback."""
    assert main.main([*map(str, arguments)]) == code
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors[errors.index("functron: ") :]


def test_a_limit_of_file_sizes_is_a_message(tmp_path, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, before[1]))
    try:
        errors = told(capsys, 1, [*SMALL, "--out", tmp_path / "r"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert errors.startswith("functron: cannot ")
    assert f"wanted room for it in {tmp_path / 'r' / 'checkpoints'}" in errors
    assert "fix: free space on that disk" in errors


def test_a_run_folder_that_is_lost_is_a_message(tmp_path, capsys, at_step):
    out = tmp_path / "r"

    def lose():
        shutil.rmtree(out / "checkpoints", ignore_errors=True)
        (out / "checkpoints").touch()

    at_step(2, lose)
    settings = [*SMALL, "--prefetch", "0", "--save-every", "3", "--out", out]
    errors = told(capsys, 1, settings)
    assert errors.startswith("functron: cannot save the checkpoint")
    assert f"{out}/checkpoints: got [Errno 17] File exists" in errors
    assert "fix: see that the disk works" in errors


def test_what_the_system_says_of_a_file_is_a_message(tmp_path):
    wanted = f"{tmp_path}/no/file: got No such file or directory; wanted to read or write it; fix:"
    with pytest.raises(process.OutsideError, match=wanted), process.outside():
        (tmp_path / "no" / "file").write_text("")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder that the kernel forbids")
def test_a_run_folder_that_cannot_be_made_is_a_message(capsys):
    errors = told(capsys, 2, [*SMALL, "--out", "/proc/here/run"])
    assert "got No such file or directory; wanted a folder to write in; fix: choose" in errors


@pytest.mark.parametrize("name", ["t.npy", "t.bin", "t.idx", "t.txt"])
def test_data_that_is_cut_short_in_a_run_is_a_message(tmp_path, capsys, at_step, name):
    """Where a map of it is touched, the system would end the process with SIGBUS."""
    tokens = np.arange(60000, dtype=np.uint16) % 200
    if name == "t.npy":
        np.save(tmp_path / name, tokens)
    elif name == "t.txt":
        (tmp_path / name).write_bytes((65 + tokens % 26).astype(np.uint8).tobytes())
    else:
        with IndexedWriter(tmp_path / "t", np.uint16) as writer:
            for document in np.split(tokens, 6000):
                writer.add(document)
    file = tmp_path / name
    size = file.stat().st_size
    at_step(1, lambda: os.truncate(file, 100))
    data = tmp_path / ("t" if name in ("t.bin", "t.idx") else name)
    more = [] if name == "t.txt" else ["--mask-documents"]
    errors = told(capsys, 1, [
        *SMALL, "--prefetch", "0", "--data", data, *more, "--out", tmp_path / "r"
    ])  # fmt: skip
    assert f"data {file}: got 100 bytes: it was cut short while it was being read" in errors
    assert f"wanted {size} bytes, as when it was opened" in errors
    assert f"({size - 100} bytes are missing)" in errors


def test_a_signal_to_the_launcher_saves_on_the_way_out(tmp_path):
    arguments = [*TRAIN, "--mesh", "dp=2", "--nproc", "2", "--steps", "100000"]
    arguments += ["--out", str(tmp_path / "r")]
    command = [sys.executable, "-m", "functron", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENV
    )
    metrics = tmp_path / "r" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=40)
    finally:
        process.kill()
    last = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert process.returncode == 128 + signal.SIGINT
    assert checkpoint.steps(tmp_path / "r" / "checkpoints") == [last]
    assert f"stopped after step {last}" in out


JOIN = """
import sys
from functron import gather, tree
from functron.cli import launch, process
from functron.training.config import configure, with_model
from functron.spmd import Mesh
from functron.training import records
from functron.training.run import prepare
config = with_model(configure(mesh="dp=2,tp=2", seq=16, seed=5), "llama3-tiny")
mesh, device = launch.join(Mesh.parse(config.parallelism.mesh), process.current(), "cpu")
run = prepare(config, mesh, device)
whole = gather(run.state, run.setup.state_specs, mesh)
import torch
torch.save((dict(mesh.coordinate), tree.leaves(whole), run.batch(3)), f"{sys.argv[1]}/{mesh.rank}.pt")
launch.leave()
"""


def test_processes_start_from_the_same_bits_and_share_the_batch(torchrun, tmp_path):
    import torch

    torchrun(JOIN, 4, tmp_path)
    config = with_model(configure(seq=16, seed=5), "llama3-tiny")
    dense = prepare(config, Mesh())
    simulated = prepare(config, Mesh(dp=2, tp=4))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for leaves in [tree.leaves(simulated.state), *(leaves for _, leaves, _ in ranks)]:
        for mine, theirs in zip(tree.leaves(dense.state), leaves, strict=True):
            assert torch.equal(mine, theirs)
    whole = dense.batch(3)
    for coordinate, _, batch in ranks:
        for name, leaf in whole.items():
            assert torch.equal(batch[name], leaf.chunk(2)[coordinate["dp"]])


def test_torchrun_and_its_wrong_process_count(torchrun, tmp_path):
    program = "import sys; from functron.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = torchrun(program, 2, *TRAIN[:5], "--mesh", "tp=2", "--steps", 2, "--out", tmp_path / "r")
    assert done.stdout.count("2 processes") == 1
    assert checkpoint.steps(tmp_path / "r" / "checkpoints") == [2]
    done = torchrun(program, 1, *TRAIN, "--out", tmp_path / "s", check=False, own=True)
    assert done.returncode != 0
    assert "mesh: got 1 process for a mesh of 3; wanted one process per rank" in done.stderr
    assert not (tmp_path / "s").exists()


def test_no_process_without_a_launcher(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert process.current() is None
    monkeypatch.setenv("WORLD_SIZE", "4")  # set by other launchers as well
    assert process.current() is None


PLACE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("RANK", "x"), ("RANK", "2"), ("RANK", "-1"), ("LOCAL_RANK", ""), ("WORLD_SIZE", "0"),
     ("WORLD_SIZE", "1.5"), ("MASTER_ADDR", ""), ("MASTER_PORT", "http")],
)  # fmt: skip
def test_variables_that_no_launcher_sets_are_named(name, value, monkeypatch, capsys):
    for variable, right in {**PLACE, "MASTER_PORT": "29500", name: value}.items():
        monkeypatch.setenv(variable, right)
    assert main.main(["params"]) == 2
    text = capsys.readouterr().err
    assert f"environment variable {name}: got {value!r}; wanted" in text
    assert "unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT" in text


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_variables_that_are_left_over_are_said_and_not_waited_for(rank, capsys):
    here = process.Process(rank, 0, 2, "", False, "127.0.0.1", _free_port())
    begun = time.monotonic()
    with pytest.raises(process.InputError) as caught:
        launch.meet(here, timeout_seconds=5.0)
    assert 1 < time.monotonic() - begun < 4
    for text in (capsys.readouterr().err, str(caught.value)):
        assert f"{'no' * (text[0] == 'c') or 'for'} rank {1 - rank}" in text
        assert f"127.0.0.1:{here.port}" in text
        assert "unset RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT" in text


def _meeting(ranks, size, port, later=(), timeout=30.0):
    """The result or error of `meet` on each rank, a thread each; those in `later` start late."""
    found = {}

    def come(rank, delay):
        time.sleep(delay)
        here = process.Process(rank, 0, size, "", False, "127.0.0.1", port)
        try:
            found[rank] = launch.meet(here, timeout_seconds=timeout)
        except process.InputError as error:
            found[rank] = error

    delays = {**dict.fromkeys(ranks, 0.0), **dict(later)}
    threads = [threading.Thread(target=come, args=pair) for pair in delays.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_ranks_wait_for_a_late_rank_0_as_for_any_other():
    """Which of them came nobody can tell where nobody meets; a fifth of the time is over by then."""
    found = _meeting([1, 2], 3, _free_port(), later=[(0, 1.5)], timeout=5.0)
    assert {type(store) for store in found.values()} == {dist.PrefixStore}, found


def test_rank_0_alone_asks_who_is_missing(monkeypatch, capsys):
    """Of the others none asks for more than whether all are there, and for its list."""
    asked = {}

    class Counting:
        def __init__(self, prefix, store):
            self.real = real(prefix, getattr(store, "real", store))

        def check(self, keys):
            asked.setdefault(threading.get_ident(), []).append(list(keys))
            return self.real.check(keys)

        def __getattr__(self, name):
            return getattr(self.real, name)

    real = dist.PrefixStore
    monkeypatch.setattr(dist, "PrefixStore", Counting)
    found = _meeting(range(5), 6, _free_port(), later=[(5, 1.0)])
    assert {type(store) for store in found.values()} == {Counting}, found
    said = capsys.readouterr().err
    assert {line.split("waits")[0] for line in said.splitlines()} == {
        f"functron: rank {rank} of 6 " for rank in range(5)
    }
    assert said.count("for rank 5, as") == 5
    keys = {ident: {key for row in rows for key in row} for ident, rows in asked.items()}
    asking = [ident for ident, names in keys.items() if any("here/" in name for name in names)]
    assert len(asking) == 1
    others = [rows for ident, rows in asked.items() if ident != asking[0]]
    assert all(len(row) == 1 for rows in others for row in rows)
    assert keys[asking[0]] >= {f"here/{rank}" for rank in range(6)}


def test_a_port_that_is_taken_is_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        here = process.Process(0, 0, 2, "", False, "127.0.0.1", port)
        with pytest.raises(process.InputError, match=f"127.0.0.1:{port}: got .*listen"):
            launch.meet(here, timeout_seconds=5.0)


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine on Linux")
@pytest.mark.parametrize(
    ("address", "is_open"),
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("node0", True)],
)
def test_it_is_known_whether_others_can_join(address, is_open, monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", address)
    here = process.current()
    assert here is not None
    assert here.is_open == is_open


def test_only_this_machine_reaches_where_processes_meet():
    """The kernel refuses any other address; by default it would be one of all that there are."""
    parameters = RendezvousParameters("functron-loopback", "127.0.0.1", "run", 1, 1)
    meeting = launch._Loopback(parameters).next_rendezvous()
    assert meeting.bootstrap_store_info is not None
    port = meeting.bootstrap_store_info.master_port
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set("word", "said")
    assert meeting.store.get("word") == b"said"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)
    everywhere = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    socket.create_connection(("127.0.0.2", everywhere.port), 5).close()


def test_the_allocator_of_a_gpu_grows_its_segments_unless_the_user_says_otherwise(monkeypatch):
    for name in process.ALLOCATOR:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: False)
    assert launch.choose_device("auto") == "cpu"
    assert process.grow_segments("cpu") == ""
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch.torch.cuda, "device_count", lambda: 1)
    assert launch.choose_device("auto") == "cuda"
    monkeypatch.setattr(process, "_has_library", lambda name: False)
    assert "libnvidia-ml.so.1 is missing" in process.grow_segments("cuda")
    assert not {*process.ALLOCATOR} & {*os.environ}
    monkeypatch.setattr(process, "_has_library", lambda name: True)
    process.grow_segments("cuda")
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in process.ALLOCATOR:
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        monkeypatch.setenv(name, "max_split_size_mb:64")
        assert process.grow_segments("cuda") == f"{name}=max_split_size_mb:64"
        assert {*process.ALLOCATOR} & {*os.environ} == {name}
        monkeypatch.delenv(name)
