"""SOAP and Adam-mini: the authors' rules written out in NumPy, matrix by matrix and block by block."""

import numpy as np
import pytest
import torch

import functron as ft
from functron import gpt, optim, random, tree
from functron.spmd.params import Normal, ParamDef

STEPS, RATE, DECAY = 20, 0.01, 0.2
KIND = (Normal(1.0), torch.float64)
DEFS = {
    "blocks": {
        "q": {"w": ParamDef((2, 6, 3, 2), ("layers", "embed", "heads", None), *KIND)},
        "v": {"w": ParamDef((2, 6, 3, 2), ("layers", "embed", "kv_heads", None), *KIND)},
        "out": {"w": ParamDef((2, 3, 2, 6), ("layers", "heads", None, "embed"), *KIND)},
        "experts": ParamDef((2, 2, 6, 5), ("layers", "expert", "embed", "mlp"), *KIND),
        "norm": ParamDef((2, 6), ("layers", "embed"), *KIND, decay=False),
    },
    "embed": ParamDef((7, 6), ("vocab", "embed"), *KIND),
    "unembed": ParamDef((6, 7), ("embed", "vocab"), *KIND),
    "positions": ParamDef((4, 6), (None, "embed"), *KIND),
    "norm": ParamDef((6,), ("embed",), *KIND, decay=False),
}
MASK = tree.map(lambda d: d.decay, DEFS)
PATHS = tree.paths(DEFS)


def values(seed):
    return ft.init_params(random.key(seed), DEFS)


def arrays(value):
    return {p: x.numpy().copy() for p, x in zip(tree.paths(value), tree.leaves(value), strict=True)}


def train(optimizer):
    params = values(0)
    state = optimizer.init(params)
    for step in range(STEPS):
        params, state = optimizer.step_(values(10 + step), state, params)
    return arrays(params), state


class Soap:
    """https://github.com/nikhilvyas/SOAP, of one matrix; weight decay as AdamW has it."""

    def __init__(self, shape, b1=0.95, b2=0.95, eps=1e-8, frequency=10, max_dim=10000):
        self.rule = b1, b2, eps, frequency
        self.m, self.v, self.count = np.zeros(shape), np.zeros(shape), 0
        self.sides = [side for side in (0, 1) if shape[side] <= max_dim]
        self.gram = {side: np.zeros((shape[side],) * 2) for side in self.sides}
        self.basis = None

    def gather(self, g, decay):
        for side in self.sides:
            outer = g @ g.T if side == 0 else g.T @ g
            self.gram[side] = decay * self.gram[side] + (1 - decay) * outer

    def project(self, x, back=False):
        for side in self.sides:
            q = self.basis[side].T if back else self.basis[side]
            x = q.T @ x if side == 0 else x @ q
        return x

    def update(self, g):
        b1, b2, eps, frequency = self.rule
        if self.basis is None:  # "first step is skipped"
            self.gather(g, b2)
            self.basis = {s: np.linalg.eigh(self.gram[s])[1][:, ::-1] for s in self.sides}
            return np.zeros_like(g)
        self.count += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * self.project(g) ** 2
        step = np.sqrt(1 - b2**self.count) / (1 - b1**self.count)
        out = step * self.project(self.project(self.m) / (np.sqrt(self.v) + eps), back=True)
        self.gather(g, b2)
        if self.count % frequency == 0:
            for side in self.sides:
                q, gram = self.basis[side], self.gram[side]
                order = np.argsort(-np.diag(q.T @ gram @ q))
                self.v = self.v[order] if side == 0 else self.v[:, order]
                self.basis[side] = np.linalg.qr(gram @ q[:, order])[0]
        return out


SHAPES = {"q": (2, 6, 6), "v": (2, 6, 6), "out": (2, 6, 6), "experts": (4, 6, 5)}


@pytest.mark.parametrize("options", [{"frequency": 3}, {"frequency": 4, "max_dim": 5}, {}])
def test_soap_is_the_authors_rule(options):
    want = arrays(values(0))
    hidden = {path: SHAPES[path.split("/")[1]] for path in PATHS if path.split("/")[-1] != "norm"
              and path.startswith("blocks")}  # fmt: skip
    rules = {
        p: [Soap(shape[1:], **options) for _ in range(shape[0])] for p, shape in hidden.items()
    }
    rest = {p: torch.from_numpy(want[p].copy()).requires_grad_() for p in PATHS if p not in hidden}
    decayed = dict(zip(PATHS, tree.leaves(MASK), strict=True))
    adam = torch.optim.AdamW(
        [{"params": x, "weight_decay": DECAY * decayed[p]} for p, x in rest.items()],
        RATE, (0.95, 0.95),
    )  # fmt: skip
    for step in range(STEPS):
        grads = arrays(values(10 + step))
        for path, shape in hidden.items():
            rows = zip(rules[path], grads[path].reshape(shape), strict=True)
            moved = np.stack([rule.update(g) for rule, g in rows]).reshape(want[path].shape)
            want[path] -= RATE * (moved + DECAY * want[path])
        for path, x in rest.items():
            x.grad = torch.from_numpy(grads[path])
        adam.step()
    want |= {path: x.detach().numpy() for path, x in rest.items()}
    matrices = optim.matrices(DEFS)
    got, state = train(optim.soap(RATE, matrices, weight_decay=DECAY, mask=MASK, **options))
    for path in PATHS:
        np.testing.assert_allclose(got[path], want[path], rtol=1e-9, atol=1e-9, err_msg=path)
    if "max_dim" in options:
        soap = state.chosen[0]
        assert soap.left["blocks"]["experts"] is None
        assert soap.right["blocks"]["experts"].shape == (2, 2, 5, 5)


def test_a_basis_is_of_the_preconditioners_eigenvectors():
    """Power iteration on the same gradient again and again ends at its singular vectors."""
    grad = torch.randn(1, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    optimizer = optim.scale_by_soap({"w": optim.Matrix(1, 1, 5, 4)}, frequency=1)
    state = optimizer.init({"w": grad})
    for _ in range(30):
        _, state = optimizer.update({"w": grad}, state)
    turned = state.right_basis["w"].mT @ state.right["w"] @ state.right_basis["w"]
    diagonal = turned.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(turned, torch.diag_embed(diagonal), atol=1e-9, rtol=0)
    scale = 1 - 0.95**30
    torch.testing.assert_close(diagonal[0], scale * torch.linalg.svdvals(grad[0]) ** 2)


# Algorithm 3 of the paper: what is averaged over, by the axes of a matrix as it is stored
BLOCKS = {
    "blocks/q/w": (1, 3), "blocks/v/w": (1,), "blocks/out/w": (1, 2), "blocks/experts": (2,),
    "blocks/norm": (1,), "embed": (1,), "unembed": (0,), "positions": (1,), "norm": (0,),
}  # fmt: skip


def test_blocks_are_the_papers():
    found = dict(zip(PATHS, tree.leaves(optim.blocks(DEFS)), strict=True))
    assert {path: block.dims for path, block in found.items()} == BLOCKS
    model = gpt.defs(gpt.PRESETS["gpt2"])
    chosen = dict(zip(tree.paths(model), tree.leaves(optim.blocks(model)), strict=True))
    assert chosen["blocks/attention/q/b"].dims == (1, 2)
    assert chosen["blocks/mlp/down/w"].dims == (1,)
    assert chosen["blocks/mlp/down/b"].dims == (1,)


def test_adam_mini_is_the_authors_rule():
    b1, b2, eps = 0.9, 0.95, 1e-8
    want = arrays(values(0))
    m = {path: np.zeros_like(x) for path, x in want.items()}
    v = dict.fromkeys(want, 0.0)
    for step in range(1, STEPS + 1):
        grads = arrays(values(9 + step))
        for path, g in grads.items():
            m[path] = b1 * m[path] + (1 - b1) * g
            v[path] = b2 * v[path] + (1 - b2) * (g**2).mean(BLOCKS[path], keepdims=True)
            h = np.sqrt(v[path]) / np.sqrt(1 - b2**step) + eps
            decay = 0 if path.endswith("norm") else DECAY
            want[path] = want[path] * (1 - RATE * decay) - RATE / (1 - b1**step) * m[path] / h
    optimizer = optim.adam_mini(RATE, optim.blocks(DEFS), b1, b2, eps, DECAY, MASK)
    got, state = train(optimizer)
    for path in PATHS:
        np.testing.assert_allclose(got[path], want[path], rtol=1e-10, atol=1e-12, err_msg=path)
    assert state[0].nu["blocks"]["q"]["w"].shape == (2, 3)
    assert state[0].nu["embed"].shape == (7,)
    saved = tree.size(state[0].nu) / tree.size(values(0))
    assert saved < 0.2
