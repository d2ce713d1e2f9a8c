"""The annotations of functron.core.typing: checked by the import hook, free without jaxtyping."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError, install_import_hook

import functron.core.typing
from tests import shapes

MODULE = """
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from functron import random
from functron.core.typing import Bool, Float, Int, Key, Scalar, Tensor


def project(x: Float[Tensor, "*batch d"], w: Float[Tensor, "d f"]) -> Float[Tensor, "*batch f"]:
    return x @ w


def wrong(x: Float[Tensor, "n d"]) -> Float[Tensor, "d n"]:
    return x


def mask(key: Key, x: Float[Tensor, " n"], on: Bool[Tensor, " #n"] | None = None) -> Scalar:
    kept = random.bernoulli(key, 0.5, x.shape)
    return (x**2 * kept * (1 if on is None else on)).sum()


class Square(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@dataclass(frozen=True)
class Config:
    width: int = 4
    names: tuple[str, ...] = ()


class Pair(NamedTuple):
    tokens: Int[Tensor, "batch seq"]
    scale: Scalar
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """A module annotated as functron's are, imported under the hook of conftest.py."""
    folder = tmp_path_factory.mktemp("hooked")
    (folder / "annotated_sample.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    try:
        with install_import_hook("annotated_sample", "beartype.beartype"):
            yield importlib.import_module("annotated_sample")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["annotated_sample"]


def test_right_shapes_pass(checked):
    x, w = torch.randn(2, 3, 4), torch.randn(4, 5)
    assert torch.equal(checked.project(x, w), x @ w)
    assert torch.equal(checked.project(x[0, 0], w), x[0, 0] @ w)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.project(torch.randn(2, 3), torch.randn(4, 5)),
        lambda m: m.project(torch.randn(2, 4), torch.randn(4)),
        lambda m: m.project(torch.arange(4), torch.randn(4, 5)),
        lambda m: m.wrong(torch.randn(2, 3)),
        lambda m: m.mask(torch.zeros(2), torch.randn(3)),
        lambda m: m.mask(torch.zeros(3).long(), torch.randn(3)),
        lambda m: m.mask(torch.zeros(2).long(), torch.randn(3), torch.ones(2).bool()),
        lambda m: torch.func.vmap(m.wrong)(torch.randn(5, 2, 3)),
    ],
)
def test_wrong_shapes_raise(checked, call):
    with pytest.raises(TypeCheckError):
        call(checked)


def test_shapes_are_those_without_the_vmaps(checked):
    x, w = torch.randn(6, 3, 4), torch.randn(4, 5)
    assert torch.allclose(torch.func.vmap(checked.project, (0, None))(x, w), x @ w)
    keys = torch.tensor([[0, 1], [0, 2]])
    got = torch.func.vmap(torch.func.grad(checked.mask, argnums=1))(keys, torch.ones(2, 3))
    assert got.shape == (2, 3)
    with pytest.raises(TypeCheckError):
        checked.mask(keys, torch.ones(2, 3))


def test_functions_with_static_methods(checked):
    x = torch.tensor([1.0, -2.0, 3.0], requires_grad=True)
    (grad,) = torch.autograd.grad(checked.Square.apply(x).sum(), x)
    assert grad.tolist() == [2, -4, 6]
    x = x.detach()
    assert torch.func.grad(lambda x: checked.Square.apply(x).sum())(x).tolist() == [2, -4, 6]
    hessian = torch.func.hessian(lambda x: checked.Square.apply(x).sum())
    batched = torch.func.vmap(lambda x: checked.Square.apply(x))(x.expand(2, 3))
    assert batched.tolist() == [[1, 4, 9]] * 2
    with pytest.raises(TypeCheckError):
        checked.Square.apply(torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="forward mode"):  # as unhooked: it has no jvp
        hessian(x)


def test_the_first_calls_of_a_case_are_held(tmp_path, monkeypatch):
    (tmp_path / "sparing_sample.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with install_import_hook("sparing_sample", "tests.shapes.first_calls"):
        sample = importlib.import_module("sparing_sample")
    right, wrong = torch.ones(2, 2), torch.ones(2, 3)
    for _ in range(2):  # cases
        shapes.begin(all_calls=False)
        for function in (sample.wrong, sample.Square.forward):
            with pytest.raises(TypeCheckError):
                function(wrong)
        for _ in range(shapes.FIRST_CALLS):
            sample.wrong(right)
        assert sample.wrong(wrong) is wrong
        with pytest.raises(TypeCheckError):  # as its own calls are few
            sample.Square.forward(wrong)
    shapes.begin(all_calls=True)
    for _ in range(4 * shapes.FIRST_CALLS):
        sample.wrong(right)
    with pytest.raises(TypeCheckError):
        sample.wrong(wrong)


def test_dataclasses_and_named_tuples(checked):
    assert checked.Config(3).width == 3
    assert checked.Config() == checked.Config(4, ())
    with pytest.raises(TypeCheckError):
        checked.Config("3")
    pair = checked.Pair(torch.zeros(2, 3).long(), torch.tensor(1.0))
    assert pair._fields == ("tokens", "scale")
    assert pair._replace(scale=torch.tensor(2.0)).scale == 2


@pytest.mark.parametrize("package", ["functron.nn", "functron.models", "functron.ops"])
def test_the_suite_checks(package):
    module = importlib.import_module(package)
    assert "jaxtyping" in type(module.__spec__.loader).__module__


def test_without_jaxtyping(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "jaxtyping"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jaxtyping", None)
    path = functron.core.typing.__file__
    spec = importlib.util.spec_from_file_location("plain_typing", path)
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    for name in ("Float", "Int", "Integer", "Bool", "Shaped"):
        assert getattr(plain, name)[torch.Tensor, "batch seq"] is torch.Tensor
    assert plain.Key is plain.Scalar is torch.Tensor

    def annotated(x: plain.Float[torch.Tensor, " n"] | None) -> plain.Key: ...

    hints = typing.get_type_hints(annotated, {"plain": plain, "torch": torch})
    assert hints == {"x": torch.Tensor | None, "return": torch.Tensor}


def test_annotations_alone_check_nothing(tmp_path):
    (tmp_path / "annotated_sample.py").write_text(MODULE)
    code = "import torch, annotated_sample as m; assert m.wrong(torch.ones(2, 3)).shape == (2, 3)"
    root = Path(functron.core.typing.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{root}:{tmp_path}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
