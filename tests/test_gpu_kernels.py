"""Kernels on a GPU: each against its reference, and models trained with them.

Their numerics are tested without a GPU in tests/kernels, from the same sources; here it is what an
emulator does not show: the compiler's code, alignment, memory ordering, launches, streams, graphs.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

import functron as ft
from functron import Mesh, gpt, ops, optim, random, tree
from functron.compiler.jit import jit
from functron.ops.glu import GLU
from functron.ops.launch import cuda
from functron.ops.norms import RMS_NORM

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from kernel_case import ODD, TINY, Given, Sizes, difference
from kernel_cases import CASES

CUDA = torch.device("cuda")
WITHIN = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Of norms, relative: of sums in another order, rounded to these dtypes."""
# rows for all of a GPU, and rows that take many blocks each
MANY, LONG = (
    Sizes(4099, 512, 1031, 2048, 64, 8, 8, 64, 2**20),
    Sizes(5, 16384, 3, 131072, 256, numel=2**22),
)
SIZES = {"tiny": TINY, "odd": ODD, "many": MANY, "long": LONG}


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_computed_at_sizes_that_fit_nothing(name):
    """On the CPU, where an op computes its reference: what the tests below rely on."""
    assert difference(CASES[name](Given(ODD, torch.float32, torch.device("cpu")))) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_its_reference(name, sizes, dtype):
    case = CASES[name](Given(SIZES[sizes], dtype, CUDA))
    assert difference(case) <= WITHIN[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_repeats_itself_bit_for_bit(name):
    case = CASES[name](Given(MANY, torch.bfloat16, CUDA))

    def run():
        args = [x.clone() if isinstance(x, torch.Tensor) else x for x in case.args]
        out = case.op.raw(*args)
        out = out if isinstance(out, tuple) else (out,)
        return [x for x in (*out, *args) if isinstance(x, torch.Tensor)]

    first = run()
    for _ in range(3):
        for a, b in zip(first, run(), strict=True):
            a, b = (x.contiguous().view(torch.uint8) for x in (a, b))
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 3])
@pytest.mark.parametrize("dtype", WITHIN, ids=str)
def test_rows_may_start_anywhere_and_lie_apart(dtype, offset):
    memory = torch.randn(40, 300, device=CUDA, dtype=torch.float32).to(dtype)
    x, scale = memory[:, offset : offset + 256], memory[0, 2:258]
    y, _ = RMS_NORM.raw(x, scale, 1e-6, False)
    want, _ = RMS_NORM.reference(x.double(), scale.double(), 1e-6, False)
    torch.testing.assert_close(y.double(), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.gpu
def test_tensors_of_more_than_two_to_the_31_elements():
    rows, dim = 2**19 + 3, 4096
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    x = torch.randn(rows, dim, device=CUDA, dtype=torch.bfloat16)
    scale = torch.ones(dim, device=CUDA, dtype=torch.bfloat16)
    y, rstd = RMS_NORM.raw(x, scale, 1e-6, False)
    z = GLU.raw(x, y, "silu")
    for part in (slice(0, 5), slice(-5, None)):
        want = RMS_NORM.reference(x[part], scale, 1e-6, False)
        torch.testing.assert_close(y[part], want[0])
        torch.testing.assert_close(rstd[part], want[1])
        torch.testing.assert_close(z[part], GLU.reference(x[part], y[part], "silu"))


@pytest.mark.gpu
class TestLaunches:
    def operands(self):
        return torch.randn(64, 256, device=CUDA), torch.randn(256, device=CUDA)

    def test_a_captured_graph_computes_what_is_in_its_operands_then(self):
        x, scale = self.operands()
        # a kernel that has not been loaded yet: loading is allowed while capturing
        GLU.raw(x, x, "silu")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = RMS_NORM.raw(x, scale, 1e-6, False)
            z = GLU.raw(y, x, "silu")
        x.copy_(torch.randn_like(x))
        graph.replay()
        want, _ = RMS_NORM.reference(x, scale, 1e-6, False)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(z, GLU.reference(y, x, "silu"))

    def test_they_run_on_the_current_stream(self):
        x, scale = self.operands()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            doubled = x * 2
            y, _ = RMS_NORM.raw(doubled, scale, 0.1, False)
        assert not stream.query()  # nothing waited for it
        stream.synchronize()
        want, _ = RMS_NORM.reference(x * 2, scale, 0.1, False)
        torch.testing.assert_close(y, want)

    def test_a_thread_of_its_own_may_launch(self):
        x, scale = self.operands()
        found = []
        thread = threading.Thread(target=lambda: found.append(RMS_NORM.raw(x, scale, 1e-6, False)))
        thread.start()
        thread.join()
        torch.testing.assert_close(found[0], RMS_NORM.reference(x, scale, 1e-6, False))

    def test_operands_on_the_cpu_are_refused(self):
        x, scale = self.operands()
        with pytest.raises((ValueError, RuntimeError), match="cpu"):
            RMS_NORM.kernel(cuda, x, scale.cpu(), 1e-6, False)


def trained(device, dtype, kernels, *, compiled=False, chunk=0, steps=20):
    """The losses of the steps of a small GPT."""
    config = gpt.GPTConfig(
        vocab_size=250, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=96,
        max_seq=32, init_stddev=0.05, dtype=dtype,
    )  # fmt: skip
    mesh, defs = Mesh(), gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    settings = optim.OptimizerConfig(b2=0.999, weight_decay=1e-4, clip_norm=1.0)
    optimizer = optim.make_optimizer(settings, 3e-3, specs=specs, mask=None, kernels=kernels)
    state = ft.init_state(random.key(0, device=device), defs, specs, optimizer, mesh)

    def loss(params, data, key):
        return gpt.loss(
            config, params, data, ft.ModelOptions(kernels=kernels, loss_chunk_tokens=chunk)
        )

    step = ft.make_step(
        ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), 2), optimizer, mesh, specs
    )
    step = jit(step, donate=0) if compiled else step
    tokens = torch.randint(0, 250, (8, 33), generator=torch.Generator().manual_seed(0))
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "rows": torch.arange(8)}
    data = tree.map(lambda leaf: leaf.to(device), data)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, data)
        losses.append(metrics["loss"].item())
    return torch.tensor(losses)


def test_the_model_of_the_tests_below_learns_and_its_chunks_change_nothing():
    """On the CPU, so that what runs on a GPU alone is little."""
    losses = trained("cpu", "float32", ops.use("reference"), steps=8)
    assert losses[-1] < losses[0] - 0.3
    chosen = trained("cpu", "float32", ops.use("kernel"), chunk=16, steps=8)
    torch.testing.assert_close(chosen, losses, rtol=1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-4), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("chunk", [0, 64], ids=["", "chunks"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_model_trains_with_kernels_as_it_does_without(dtype, within, compiled, chunk):
    want = trained("cuda", dtype, ops.use("reference"))
    got = trained("cuda", dtype, ops.use("kernel"), compiled=compiled, chunk=chunk)
    torch.testing.assert_close(got, want, rtol=within, atol=0)
