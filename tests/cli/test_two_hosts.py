import re
import time
import pytest
from tests.hosts import Hosts
SMALL = ["--data", re.__file__, "--seq", "16", "--model", "llama3-tiny", "--device", "cpu", "--global-batch", "8"]

def steps(out):
    try: return (out/"metrics.jsonl").read_text().count("\n")
    except OSError: return 0
def until(cond, s=60):
    t=time.time()
    while not cond():
        assert time.time()-t < s
        time.sleep(0.1)
@pytest.mark.parametrize("more", [["--hang-after", 3, "--timeout-seconds", 20], ["--hang-after", 0, "--timeout-seconds", 8]])
@pytest.mark.parametrize("what", ["cut", "kill0", "kill1"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2","tp=2,dp=2"])
def test_a(tmp_path, torchrun, what, more, mesh):
    if mesh != "dp=2,tp=2" : pytest.skip()
    t0 = time.time()
    with Hosts(tmp_path, torchrun) as hosts:
        one = hosts.launch("train", *SMALL, "--mesh", mesh, "--steps", 50000, "--out", tmp_path / "run", *more)
        until(lambda: steps(tmp_path/"run")>3)
        t = time.time()
        print("started", t-t0)
        hosts.cut() if what == "cut" else hosts.kill(int(what[-1]))
        one.thread.join(100)
        for i in range(2): print(what, more, i); print(re.sub(r".*step/s.*\r", "", one.read(i)))
        try:
            print([x[0] for x in one.wait(1)], time.time() - t)
        finally:
            for x in (tmp_path/"run").glob("events*"): print(x.read_text())
            print(list((tmp_path/"run").glob("hangs/*")))
            for n in ("machine-a", "machine-b"): 
                p=one.folder/(n+".code")
                if p.exists(): print(n, p.read_text(), p.stat().st_mtime - t)
