"""Numbers on a device, made without a copy that the host waits for; memory that is kept; attention
by the kernel of CPUs, without the scores that are hidden."""

import contextlib
import math
import os
import subprocess
import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode

from functron.core import compat

VALUES = [True, 3, 2.5, [1, 2, 3], (0.5, 1.0), [[True], [False]]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_constants_are_those_of_torch(value, device):
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        made = compat.constant(value, device)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(made, torch.tensor(value, device=device), rtol=0, atol=0)


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(7)], ids=str)
def test_a_number_on_a_cpu_goes_anywhere(value):
    made = compat.constant(value, "meta")
    assert (made.device.type, made.dtype, made.shape) == ("meta", value.dtype, ())
    assert compat.constant(value, "cpu") is value


def test_freed_memory_is_kept_for_the_next_step():
    """A step that frees 80 MB has the system clear 20,000 pages in the next one, unless kept."""
    program = """
import resource
import torch
from functron.core import compat

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [torch.ones(2 << 20) for _ in range(10)]
    del kept
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = min(faults() for _ in range(4))
compat.keep_freed_memory()
print(given_back, min(faults() for _ in range(4)))
"""
    command = [sys.executable, "-c", program]
    # the C library's own first choice, which it else gives up at the first block that is freed
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    given_back, kept = map(int, run.stdout.split())
    assert 10 * kept < given_back  # 20,000, or fewer of larger pages


@pytest.mark.parametrize("seq", [128, 129, 200, 1024])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1)])
def test_bands_of_causal_attention(seq, heads, kv_heads):
    """The formula in double precision, its derivatives, and the layouts of torch's operation."""
    torch.manual_seed(seq)
    made = [torch.randn(2, seq, n, 4, dtype=torch.float64) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in made)
    grouped = [x.repeat_interleave(heads // kv_heads, 1) for x in (k, v)]
    scores = 0.3 * q @ grouped[0].mT
    hidden = torch.ones(seq, seq, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    expected = scores.softmax(-1) @ grouped[1]
    g = torch.randn_like(expected)
    with FakeTensorMode() as mode:  # which leaves nothing behind
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        assert compat.causal_flash(*fakes, 0.3)[0].shape == expected.shape
    with torch.no_grad():
        out, lse = compat.causal_flash(q, k, v, 0.3)
        grads = compat.causal_flash_backward(g, q, k, v, out, lse, 0.3)
    wanted = [expected, scores.logsumexp(-1), *torch.autograd.grad(expected, (q, k, v), g)]
    torch.testing.assert_close([out, lse, *grads], wanted, rtol=1e-10, atol=1e-10)
    name = "_scaled_dot_product_flash_attention_for_cpu"
    whole = getattr(torch.ops.aten, name)(q, k, v, 0.0, True, scale=0.3)
    back = getattr(torch.ops.aten, f"{name}_backward")(g, q, k, v, *whole, 0.0, True, scale=0.3)
    alike = zip([out, lse, *grads], [*whole, *back], strict=True)
    assert all(a.stride() == b.stride() for a, b in alike)


def test_where_bands_pay(monkeypatch):
    """For one thread from 128 queries on, for more from 384; torch skips blocks of 512 keys."""
    q = torch.empty(2, 4, 2048, 8)
    rows = {1: [128, 1024], 2: [384, 1024], 16: []}
    for threads, (*ends,) in rows.items():
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        found = [n for n in range(1, 2049) if compat.skips_hidden(q[:, :, :n], q[:, :, :n])]
        assert [*found[:1], *found[-1:]] == ends
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    half = q[:, :, :128].bfloat16()  # in which sums over bands would be rounded
    assert not compat.skips_hidden(half, half)
    assert not compat.skips_hidden(q[:, :, :128], q[:, :, :256])


@pytest.mark.parametrize("blind", [False, True])
def test_what_an_interrupt_left_entered_is_left(blind):
    """Ctrl-C may come between the end of a with block and its exit."""
    with compat.no_overrides() if blind else contextlib.nullcontext():
        around = compat.Ambient.here()
        compat.no_overrides().__enter__()
        torch.set_grad_enabled(False)
        around.put_back()
        assert compat.Ambient.here() == around
        assert torch._C._is_torch_function_enabled() == (not blind)
