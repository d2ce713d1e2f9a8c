"""Programs as text: what a reader sees, and text and HTML that lose nothing."""

import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from html.parser import HTMLParser
from typing import NamedTuple

import pytest
import torch

import functron as ft
import functron.compiler
from functron import Mesh, P, gpt, lax, optim, random, tree
from functron.core.scopes import in_phase, named_scope
from functron.program.equations import (
    Block,
    ControlFlow,
    Equation,
    Input,
    Output,
    Scan,
    Var,
    Where,
)
from functron.program.parse import parse
from functron.program.text import diff, html
from functron.program.text import format as text_of
from functron.program.trace import Program, trace
from tests.transforms.flow_programs import loop, switch

aten, ops = torch.ops.aten, torch.ops.functron


class Vars:
    """Makes variables, each in new memory unless it shares that of another."""

    def __init__(self):
        self.count = 0

    def __call__(self, name, shape, dtype=torch.float32, stride=None, device="cpu", of=None):
        stride = stride or tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        self.count += 1
        nbytes = of.storage_bytes if of else math.prod(shape) * dtype.itemsize
        storage = of.storage if of else self.count
        return Var(name, shape, stride, dtype, torch.device(device), storage, nbytes)


def hand_made() -> Program:
    """y = psum(x @ w) doubled and gathered, then a scan of h = h * u * s + row; written out."""
    var = Vars()
    x, w = var("x", (4, 8)), var("w", (8, 16), torch.bfloat16, (1, 8))
    half, index = var("half", (2, 8), of=x), var("i", (), torch.int64)
    table = var("table", (3,), device="cuda:0")
    c, mm, psum = var("c", (8, 16), stride=(1, 8)), var("mm", (4, 16)), var("psum", (4, 16))
    add, all_gather = var("add", (4, 16)), var("all", (4, 4, 16))
    top, last, rows = var("top", (4, 1)), var("last", (4, 16)), var("rows", (4, 4, 16))
    s, h, u = var("s", (4, 16)), var("h", (4, 16)), var("u", (4, 16))
    hu, hus = var("hu", (4, 16)), var("hus", (4, 16))
    body = Block(
        (s, h, u),
        (
            Equation(aten.mul.Tensor, (h, u), {}, (hu,)),
            Equation(ops.psum.default, (hu, "dp", 2), {"must_vary": False}, (hus,)),
        ),
        (hus, h),
    )
    up = Where("forward", ("mlp", "up"), "/home/me/model.py:12: `x @ w`")
    scan = Where("backward", ("layers",), "/home/me/a b.py:7: `scan(...)`")
    equations = (
        Equation(aten._to_copy.default, (w,), {"dtype": torch.float32}, (c,), up),
        Equation(aten.mm.default, (x, c), {}, (mm,), up),
        Equation(ops.psum.default, (mm, "tp", 4), {"must_vary": True}, (psum,), up),
        Equation(aten.add.Tensor, (psum, psum), {"alpha": 1}, (add,), Where("recompute")),
        Equation(ops.all_gather.default, (add, "tp", 4), {}, (all_gather,), Where("backward")),
        Equation(aten.topk.default, (add, 1), {}, (top, None)),
        Equation(Scan(body, 4, 1, 1, True, "step"), (add, psum, all_gather), {}, (last, rows), scan),
    )  # fmt: skip
    inputs = (
        Input(w, "0/my w", P(None, ("fsdp", "tp"))),
        Input(x, "0/x", P("dp"), donated=True),
        Input(half, "2"),
        Input(index, "tp", P("tp"), role="axis_index"),
        Input(table, "", P(), role="constant", value=torch.zeros(3)),
    )
    results = (last, 7, "done", rows)
    outputs = (
        Output(last, "last", P("dp")),
        Output(7, "n"),
        Output("done", "s"),
        Output(rows, "ys"),
    )
    return Program(
        "<lambda>",
        Mesh(dp=2, tp=4),
        Block(tuple(entry.var for entry in inputs), equations, results),
        inputs,
        outputs,
        tree.structure(({"my w": 0, "x": 0}, 0, 0)),
        tree.structure({"last": 0, "n": 0, "s": 0, "ys": 0}),
        {2: 0.5},
        False,
    )


HAND_MADE = """\
program <lambda> on Mesh(dp=2, tp=4): 9 equations, unchecked
inputs:
  %w: bf16[8,16]{1,8}    '0/my w'  P(None, ('fsdp', 'tp'))
  %x: f32[4,8]           0/x       P('dp')                  donated
  0.5                    1                                  static
  %half: f32[2,8]        2                                  shares %x
  %i: i64[]              tp        P('tp')                  axis_index
  %table: f32[3]@cuda:0  ''        P()                      constant
equations:
  %c: f32[8,16]{1,8}             = _to_copy(%w, dtype=f32)             # forward    mlp/up  model.py:12
  %mm: f32[4,16]                 = mm(%x, %c)                          # forward    mlp/up  model.py:12
  %psum: f32[4,16]               = psum(%mm, 'tp', 4, must_vary=True)  # forward    mlp/up  model.py:12  256 bytes over tp
  %add: f32[4,16]                = add.Tensor(%psum, %psum)            # recompute  -       -
  %all: f32[4,4,16]              = all_gather(%add, 'tp', 4)           # backward   -       -            1024 bytes over tp
  %top: f32[4,1], _              = topk(%add, 1)                       # forward    -       -
  scan[length=4, reverse] step {                                       # backward   layers  'a b.py:7'
    const %s: f32[4,16] = %add
    carry %h: f32[4,16] = %psum
    x     %u: f32[4,16] = %all
    %hu: f32[4,16]  = mul.Tensor(%h, %u)  # forward    -  -
    %hus: f32[4,16] = psum(%hu, 'dp', 2)  # forward    -  -  256 bytes over dp
    carry %hus  -> %last: f32[4,16]
    y     %h    -> %rows: f32[4,4,16]
  }
outputs:
  %last: f32[4,16]    last  P('dp')
  7                   n
  'done'              s
  %rows: f32[4,4,16]  ys
"""


def test_text_of_a_hand_made_program():
    assert text_of(hand_made()) == HAND_MADE


def test_parsing_gives_the_hand_made_program_back():
    made, parsed = hand_made(), parse(HAND_MADE)
    assert_same(made, parsed)
    scan, other = (program.block.equations[-1].op for program in (made, parsed))
    assert isinstance(scan, Scan)
    assert isinstance(other, Scan)
    assert (other.length, other.num_consts, other.num_carry) == (4, 1, 1)
    assert (other.reverse, other.name) == (True, "step")
    assert (parsed.name, parsed.mesh, parsed.checked) == ("<lambda>", Mesh(dp=2, tp=4), False)
    assert parsed.static == {2: 0.5}
    assert parsed.block.outputs[1:3] == (7, "done")


def test_operations_without_results_are_kept():
    text = HAND_MADE.replace("9 equ", "10 equ")
    text = text.replace("equations:\n", "equations:\n  _assert_async(%i)  # forward  -  -\n", 1)
    equation = parse(text).block.equations[0]
    assert (equation.name, equation.outputs) == ("_assert_async", ())
    assert parse(text_of(parse(text))).block.equations[0].op is equation.op


def test_memory_of_inputs_that_is_larger_than_they_are_is_kept():
    text = HAND_MADE.replace(
        "P('dp')                  donated", "P('dp')                  donated of 4096 bytes"
    )
    parsed = parse(text)
    assert text_of(parsed) == text
    assert [entry.var.storage_bytes for entry in parsed.inputs if entry.path in ("0/x", "2")] == [
        4096,
        4096,
    ]


# --- traced programs


def mapped(fn, in_specs, out_specs, *args, mesh=None, check=False) -> Program:
    mesh = mesh or Mesh(dp=2, tp=4)
    return trace(ft.shard_map(fn, mesh, in_specs, out_specs, check=check))(*args)


MLP_SPECS = {"up": P(None, "tp"), "down": P("tp", None)}


def mlp_step(weights, x):
    """Forward and backward of a tensor-parallel MLP."""

    def mlp(weights, x):
        with named_scope("mlp"):
            return lax.psum(torch.relu(x @ weights["up"]) @ weights["down"], "tp")

    y, pullback = ft.vjp(mlp, weights, x)
    with in_phase("backward"):
        return y, pullback(y)


def mlp_program() -> Program:
    weights = {"up": torch.zeros(8, 32), "down": torch.zeros(32, 8)}
    specs = (MLP_SPECS, P("dp"))
    return mapped(mlp_step, specs, (P("dp"), specs), weights, torch.zeros(6, 8))


def test_tensor_parallel_mlp_shows_its_two_all_reduces():
    """Rows of this file: local x is [3, 8], so the sum of y and that of its cotangent are 96 bytes."""
    lines = [line for line in text_of(mlp_program()).splitlines() if " psum(" in line]
    forward, backward = lines
    here = r"mlp  test_text\.py:\d+  96 bytes over tp"
    assert re.fullmatch(
        rf"  %psum: f32\[3,8\] += psum\(%\w+, 'tp', 4\) +# forward +{here}", forward
    )
    assert re.fullmatch(
        rf"  %psum_1: f32\[3,8\] += psum\(%\w+, 'tp', 4\) +# backward +{here}", backward
    )


def test_local_shapes_and_specs_of_inputs_are_shown():
    text = text_of(mlp_program())
    assert re.search(r"^  %down: f32\[8,8\] +0/down +P\('tp', None\)$", text, re.M)
    assert re.search(r"^  %up: f32\[8,8\] +0/up +P\(None, 'tp'\)$", text, re.M)
    assert re.search(r"^  %\w+: f32\[3,8\] +1 +P\('dp'\)$", text, re.M)


def collectives_program() -> Program:
    def f(x):
        gathered = lax.all_gather(x, "tp")
        summed = lax.psum_scatter(gathered, "tp")
        swapped = lax.all_to_all(gathered, "tp", 0, 0)
        shifted = lax.ppermute(x, "tp", [(0, 1), (2, 3)])
        top = lax.pmax(x, "dp") + lax.pmin(x, "dp")
        return summed + swapped[0] + shifted + top + lax.axis_index("tp")

    return mapped(f, P("dp", "tp"), P("dp", "tp"), torch.zeros(6, 8))


def test_payloads_of_collectives():
    """A shard is float32 [3, 2]: 24 bytes, and four of them 96."""
    found = re.findall(r"= (\w+)\(.* (\d+) bytes over (\w+)$", text_of(collectives_program()), re.M)
    assert sorted(found) == [
        ("all_gather", "96", "tp"),
        ("all_to_all", "96", "tp"),
        ("pmax", "24", "dp"),
        ("pmin", "24", "dp"),
        ("ppermute", "24", "tp"),
        ("psum_scatter", "96", "tp"),
    ]


def scan_program() -> Program:
    def f(weights, x):
        def layer(h, w):
            return lax.psum(torch.tanh(h @ w), "tp"), h.sum()

        def loss(weights):
            h, sums = ft.scan(layer, x, weights)
            return (h * h).sum() + sums.sum()

        return ft.grad(loss)(weights)

    return mapped(f, (P(), P("dp")), P(), torch.zeros(5, 8, 8), torch.zeros(4, 8))


class Pair(NamedTuple):
    second: object
    first: object


def oddities_program() -> Program:
    """Constants, views, several outputs, other dtypes, static arguments, infinities, odd names."""
    table = torch.arange(3.0)

    def f(pair, config, rows):
        x = pair.second["a b"].to(torch.bfloat16)
        a, b = x.chunk(2, dim=1)
        scores = torch.where(a.T > 0, b.T, float("-inf")) * config["scale"]
        with named_scope("odd name's"):
            top = torch.topk(scores.float(), 1, dim=0)
        complex_ = torch.fft.fft(pair.first)
        return (
            {"top": top.values, "i": top.indices, "c": complex_.imag},
            table[rows],
            x[1:].t(),
            3,
            None,
        )

    pair = Pair({"a b": torch.zeros(4, 6), "z": torch.zeros(2)}, torch.zeros(4))
    return trace(f, donate=0)(
        pair, {"scale": 2, "name": "it's", "kind": Pair}, torch.tensor([0, 2])
    )


def training_program(num_microbatches: int = 1, remat: bool = False) -> Program:
    config = gpt.GPTConfig(
        vocab_size=40, num_layers=3, embed_dim=16, num_heads=4, mlp_dim=24, max_seq=12
    )
    mesh, defs = Mesh(dp=2, tp=2), gpt.defs(config)
    specs = ft.param_specs(defs, gpt.rules(config, mesh))
    adam = optim.adamw(optim.linear(1e-2, 10), weight_decay=0.1)
    optimizer = optim.chain(optim.clip_by_global_norm(0.5, specs), adam)

    def loss(params, data, key):
        return gpt.loss(config, params, data, key=key)

    step = ft.make_step(
        ft.accumulated(ft.mean_gradients(loss, gpt.num_targets), num_microbatches),
        optimizer,
        mesh,
        specs,
    )
    state = ft.init_state(random.key(1), defs, specs, optimizer, mesh)
    tokens = torch.zeros(8, 12, dtype=torch.int64)
    return trace(step, donate=0)(state, {"tokens": tokens, "targets": tokens, "rows": tokens[:, 0]})


def flow_program() -> Program:
    """Rows that take branches, one of which has a loop, and gradients of all that."""

    def row(total, x):
        def settled(x):
            return loop(lambda c: lax.pmax(c, "tp") > 1, lambda c: c / 2, x.detach().sum()) * x

        branches = [torch.sin, settled, lambda x: lax.psum(x, "tp").cos() * total]
        return total + switch(lax.axis_index("dp"), branches, x).sum(), None

    def program(x):
        return ft.grad(lambda x: ft.scan(row, x[0, 0], x)[0], axes=())(x)

    mapped = ft.shard_map(program, Mesh(dp=2, tp=2), P(None, "dp"), P(), check=False)
    return trace(mapped)(torch.ones(5, 4))


PROGRAMS = {
    "flow": flow_program,
    "mlp": mlp_program,
    "collectives": collectives_program,
    "scan": scan_program,
    "oddities": oddities_program,
    "training": training_program,
    "training in microbatches": lambda: training_program(num_microbatches=2),
}


@pytest.fixture(scope="module", params=list(PROGRAMS))
def program(request) -> Program:
    return PROGRAMS[request.param]()


def sharing(block: Block) -> list:
    """For every value, where in the block its memory comes up first, and how large it is."""
    values = [*block.inputs, *(value for each in block.equations for value in each.results)]
    order: dict[int, int] = {}
    return [
        (order.setdefault(value.storage, index), value.storage_bytes, value.stride, value.dtype)
        for index, value in enumerate(values)
    ]


def assert_same(a: Program, b: Program) -> None:
    """Programs must agree in meaning; identities of variables need not."""
    assert [(e.path, e.spec, e.donated, e.role) for e in a.inputs] == [
        (e.path, e.spec, e.donated, e.role) for e in b.inputs
    ]
    assert [(e.path, e.spec) for e in a.outputs] == [(e.path, e.spec) for e in b.outputs]
    assert b.block.inputs == tuple(entry.var for entry in b.inputs)
    assert b.block.outputs == tuple(entry.value for entry in b.outputs)
    assert tree_paths(a.in_structure) == tree_paths(b.in_structure)
    assert tree_paths(a.out_structure) == tree_paths(b.out_structure)
    assert a.static.keys() == b.static.keys()
    pairs = list(zip(a.block.walk(), b.block.walk(), strict=True))
    assert len(pairs) > 0
    for (one, times), (other, again) in pairs:
        assert (times, one.name, one.where.phase) == (again, other.name, other.where.phase)
        assert one.where.scopes == other.where.scopes
        assert one.aliases == other.aliases
        if isinstance(one.op, ControlFlow):
            assert (one.op.kind, one.op.key) == (other.op.kind, other.op.key)
        else:
            assert one.op is other.op
    for one, other in zip(a.block.walk_blocks(), b.block.walk_blocks(), strict=True):
        assert sharing(one) == sharing(other)


def tree_paths(structure) -> list[str]:
    return tree.paths(tree.unflatten(structure, range(structure.num_leaves)))


def test_text_round_trips(program):
    text = text_of(program)
    parsed = parse(text)
    assert text_of(parsed) == text
    assert diff(program, parsed) == ""
    assert_same(program, parsed)


def test_text_is_the_same_for_two_traces():
    assert text_of(training_program()) == text_of(training_program())
    assert text_of(flow_program()) == text_of(flow_program())
    assert flow_program().diff(flow_program()) == ""


def test_text_names_no_folder(program):
    assert "/test_text.py" not in text_of(program)
    assert "/functron/" not in text_of(program)


def test_the_body_of_a_scan_is_written_once():
    text = text_of(scan_program())
    assert text.count("scan[length=5] ") == 1
    assert text.count("scan[length=5, reverse] ") == 1
    assert sum(" tanh(" in line for line in text.splitlines()) == 1


BRANCHES = """\
program route on Mesh(): 7 equations, unchecked
inputs:
  %i: i64[]   0
  %x: f32[4]  1
equations:
  switch[on=%i, branches=2, weights=(0.25, 0.75)] route {  # forward    -  -
    const %a: f32[4] = %x
    %sin: f32[4] = sin(%a)  # forward    -  -
    y     %sin  -> %y: f32[4]
    y     %a    -> %z: f32[4]
  } or {
    const %b: f32[4] = %x
    %neg: f32[4] = neg(%b)  # forward    -  -
    y     %neg  -> %y: f32[4]
    y     %neg  -> %z: f32[4]
  }
  %sum: f32[]                                              = sum(%y)  # forward    -  -
  while[trips=12] halve {                                  # forward    -  -
    const %k: i64[]   = %i
    carry %c: f32[]   = %sum
    %gt: bool[] = gt.Tensor(%c, %k)  # forward    -  -
    test  %gt
  } do {
    const %k: i64[]   = %i
    carry %d: f32[]   = %sum
    %div: f32[] = div.Tensor(%d, 2)  # forward    -  -
    carry %div  -> %last: f32[]
  }
outputs:
  %last: f32[]  last
  %z: f32[4]    z
"""


def test_switches_and_loops_by_hand():
    program = parse(BRANCHES)
    assert " ".join(text_of(program).split()) == " ".join(BRANCHES.split())
    x = torch.tensor([0.5, 1.0, 1.5, 2.0])
    for index in (1, 7):
        got = program(torch.tensor(index), x)
        assert (got["last"], got["z"].tolist()) == (-5.0, (-x).tolist())
    got = program(torch.tensor(0), x)  # a sum of 3.2, halved until it is not above 0
    assert (got["last"], got["z"].tolist()) == (0.0, x.tolist())
    changed = BRANCHES.replace("sin(%a)", "cos(%a)").replace("%sin", "%cos")
    lines = [line.split("#")[0].strip() for line in diff(BRANCHES, changed).splitlines()]
    assert [line for line in lines if line[0] in "+-"] == [
        "-     %sin: f32[4] = sin(%a)",
        "+     %sin: f32[4] = cos(%a)",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("branches=2, weights=(0.25, 0.75)", "branches=3", r"line 16: got '\}'; wanted 'y %inner -> %outer: type' or '\} or \{'"),
        ("branches=2, weights=(0.25, 0.75)", "branches=1", r"line 11: .*wanted 'y %inner"),
        ("on=%i", "on=%j", "line 6: got %j; wanted a variable"),
        ("(0.25, 0.75)", "(1.0,)", "line 6: .*as many weights"),
        ("%b: f32[4] = %x", "%b: i64[] = %i", "line 6: got others for branch 1; wanted the same operands"),
        ("y     %neg  -> %z: f32[4]", "y     %neg  -> %w: f32[4]", "line 6: got 3 of 1; wanted 2 results|line"),
        ("y     %neg  -> %z: f32[4]\n", "", "line 6: got 1 of 1; wanted 2 results"),
        ("y     %neg  -> %y: f32[4]", "y     %neg  -> %z: f32[4]", "line 14: got %z; wanted the results in the order"),
        ("test  %gt", "test  %c", "line 22: got something else; wanted one bool"),
        ("} do {", "} or {", r"line 23: .*wanted '\} do \{'"),
        ("carry %d: f32[]   = %sum", "carry %d: f32[4]   = %y", "line 18: got others; wanted the same operands"),
        ("    carry %div  -> %last: f32[]\n", "", "line 18: got 0; wanted 1 results"),
    ],
)  # fmt: skip
def test_mistakes_in_switches_and_loops_are_named(old, new, message):
    text = new.join(BRANCHES.rsplit(old, 1))
    assert text != BRANCHES
    with pytest.raises(ValueError, match=f"cannot parse the program\n  - ({message})"):
        parse(text)


# --- errors


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("program <lambda> on", "program <lambda> off", r"line 1: got 'off Mesh.*'on Mesh\("),
        ("tp=4)", "tp=0)", r"line 1: got Mesh\(dp=2, tp=0\); wanted Mesh\(axis=size"),
        ("9 equations", "8 equations", "line 1: got 8 equations; wanted 9"),
        ("inputs:", "arguments:", "line 2: got 'arguments:'; wanted 'inputs:'"),
        ("%x: f32[4,8] ", "%x: float[4,8] ", r"line 4: .*wanted a type, such as f32\[4,8\]"),
        ("{1,8}    '0", "{1}    '0", "line 3: .*wanted 2 strides"),
        ("shares %x", "shares %y", "line 6: got %y; wanted a variable of this block"),
        ("static", "statik", "line 5: got 'statik'; wanted 'static'"),
        ("= mm(%x", "= mn(%x", "line 11: got 'mn'; wanted an operation"),
        ("add.Tensor", "add.Tensors", "line 13: got 'add.Tensors'; wanted an operation"),
        ("mm(%x, %c)", "mm(%x, %psum)", "line 11: got %psum; wanted a variable of this block that is defined above"),
        ("mm(%x, %c)", "mm(%x, %x)", r"line 11: got aten.mm.default, which refuses its operands"),
        ("%mm: f32[4,16]", "%mm: f32[4,17]", r"line 11: got f32\[4,17\].*wanted f32\[4,16\]"),
        ("%mm: f32", "%c: f32", "line 11: got %c, which an earlier line has defined"),
        ("256 bytes over tp", "128 bytes over tp", "line 12: got '128 bytes over tp'; wanted '256"),
        ("# recompute", "# again", "line 13: got 'again.*wanted forward, recompute or backward"),
        (", _  ", "     ", "line 15: got 1 results; wanted 2, as aten.topk.default returns"),
        ("x     %u", "const %u", r"line 19: got 'const %u.*wanted %all to be f32\[4,16\] there"),
        (
            "const %s: f32[4,16] = %add\n    carry %h",
            "carry %s: f32[4,16] = %add\n    const %h",
            "line 16: got operands in the order carry, const, x; wanted const, then carry, then x",
        ),
        ("-> %rows: f32[4,4,16]", "-> %rows: f32[3,4,16]", r"line 23: .*wanted %rows to be f32\[4,4,16\]"),
        ("  }\n", "", r"line 24: got 'outputs:'; wanted 'carry %inner"),
        ("P('dp')\n  7", "P(5)\n  7", "line 26: got .*wanted P of axis names"),
        ("'done' ", "done ", "line 28: got 'done.*wanted a value"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_their_line(old, new, message):
    text = HAND_MADE.replace(old, new, 1)
    assert text != HAND_MADE
    with pytest.raises(ValueError, match=f"cannot parse the program\n  - {message}"):
        parse(text)


@pytest.mark.parametrize("lines", [0, 1, 5, 12, 18, 22])
def test_a_text_that_breaks_off_is_refused(lines):
    with pytest.raises(ValueError, match=f"line {lines + 1}: got the end of the text"):
        parse("".join(HAND_MADE.splitlines(keepends=True)[:lines]))


# --- differences


def test_renumbering_columns_and_line_numbers_are_no_difference():
    names = {name: f"%v{k}" for k, name in enumerate(re.findall(r"%\w+", HAND_MADE))}
    renamed = re.sub(r"%\w+", lambda name: names[name[0]], HAND_MADE)
    renamed = re.sub(" +=", " =", renamed).replace("model.py:12", "model.py:13")
    assert renamed != HAND_MADE
    assert diff(hand_made(), renamed) == ""
    assert diff(renamed, HAND_MADE) == ""


def test_an_inserted_equation_is_the_only_difference():
    """Later names of the second program are all shifted."""
    before = text_of(tanh_program(lambda y: y))
    after = text_of(tanh_program(lambda y: y * 3))
    changed = [line for line in diff(before, after).splitlines() if line[0] in "+-"]
    assert [line[0] for line in changed if "equations" in line] == ["-", "+"]
    rest = [line for line in changed if "equations" not in line]
    assert [line for line in rest if line[0] == "+" and "mul.Tensor(%tanh, 3)" in line]
    # besides it, only the equation that used tanh and now uses the product
    assert Counter(line[0] for line in rest) == {"+": 2, "-": 1}


def tanh_program(change) -> Program:
    def f(x):
        y = change(torch.tanh(x * 2))
        for _ in range(5):
            y = y * x
        return y

    return trace(f)(torch.zeros(3))


def test_changes_in_a_chain_of_equal_equations_stay_where_they_are():
    chain = [f"  %m{k + 1}: f32[4,4] = mm(%m{k}, %w)  # forward  -  -" for k in range(50)]
    changed = [line.replace("%", "%n") for line in chain]
    changed.insert(40, "  %a: f32[4,4] = tanh(%nw)  # forward  -  -")
    changed.insert(3, "  %b: f32[4,4] = relu(%nw)  # forward  -  -")
    lines = [
        line for line in diff("\n".join(chain), "\n".join(changed)).splitlines() if line[0] in "+-"
    ]
    assert [line.split()[1:5] for line in lines] == [
        ["%b:", "f32[4,4]", "=", "relu(%w)"],
        ["%a:", "f32[4,4]", "=", "tanh(%w)"],
    ]


def test_swapped_operands_are_a_difference():
    one = text_of(trace(lambda x, y: (x - y) * y)(torch.zeros(3), torch.zeros(3)))
    other = text_of(trace(lambda x, y: (y - x) * y)(torch.zeros(3), torch.zeros(3)))
    assert diff(one, one) == ""
    changed = [line[0] for line in diff(one, other).splitlines() if line[0] in "+-"]
    assert changed == ["-", "+"]


def test_a_difference_in_a_scan_body_is_found():
    other = HAND_MADE.replace("mul.Tensor(%h, %u)", "mul.Tensor(%u, %u)")
    lines = [line for line in diff(HAND_MADE, other).splitlines() if line[0] in "+-"]
    assert [line.split("#")[0].split() for line in lines] == [
        ["-", "%hu:", "f32[4,16]", "=", "mul.Tensor(%h,", "%u)"],
        ["+", "%hu:", "f32[4,16]", "=", "mul.Tensor(%u,", "%u)"],
    ]


# --- HTML


class Page(HTMLParser):
    """Checks that tags nest, and collects what a test asks about."""

    def __init__(self, source: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.classes: Counter[str] = Counter()
        self.links: list[str] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "class":
                self.classes.update(value.split())
            if name in ("src", "href"):
                self.links.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += "" if self.open and self.open[-1] == "style" else data


def test_html_is_well_formed_and_self_contained(program):
    source = html(program)
    page = Page(source)
    assert page.links == []
    assert page.tags["script"] == 0
    assert "url(" not in source
    assert "@import" not in source
    for equation, _ in program.block.walk():
        for value in equation.results:
            assert f"%{value.name}: " in page.text


def test_html_marks_collectives_by_axis_phases_and_scans():
    page = Page(html(hand_made()))
    # one psum over dp, a psum and an all_gather over tp, and the two keys of the legend
    assert (page.classes["axis0"], page.classes["axis1"]) == (1 + 1, 2 + 1)
    assert page.classes["recompute"] == 1 + 1
    assert page.tags["details"] == 4  # inputs, equations, outputs and the scan
    assert "scan[length=4, reverse] step: 2 equations, 1 psum over dp" in page.text
    assert "program <lambda> on Mesh(dp=2, tp=4)" in page.text


class Weights(NamedTuple):
    w: torch.Tensor
    b: torch.Tensor


class Without:
    """A static value without a notation."""


X, STATIC = torch.linspace(-1, 1, 4), Without()
TREES = {
    "dict": {"w": X, "b": X + 1},
    "ordered": OrderedDict(w=X, b=X + 1),
    "default": defaultdict(list, w=X, b=X + 1),
    "named tuple": Weights(X, X + 1),
    "list": [X, X + 1],
    "deque": deque([X, X + 1]),
    "nested": {"z": [X, Weights(X, (X,))], "none": None, "empty": {}, "a": {1: X, 0: X + 1}},
    "the same path twice": {"a/b": X, "a": {"b": X + 1}},
    "static": {"k": 3, "t": True, "n": math.nan, "d": torch.float32, "c": 2j, "o": STATIC, "w": X},
}


@pytest.mark.parametrize("name", TREES)
def test_the_read_program_takes_the_arguments_that_were_traced(name):
    def f(given, y):
        rows = [leaf for leaf in tree.leaves(given) if isinstance(leaf, torch.Tensor)]
        return {"y": sum((i + 1) * x for i, x in enumerate(rows)) * y, "x": Weights(y, [y * 2])}

    args = (TREES[name], X)
    read = parse(str(trace(f)(*args)))
    want = tree.leaves(f(*args))
    for run in (read, functron.compiler.compile(read, backend="eager"), parse(str(read))):
        got = run(*args)
        assert tree.paths(got) == tree.paths(f(*args))
        torch.testing.assert_close(tree.leaves(got), want, rtol=0, atol=0)


def test_a_read_step_takes_the_state_that_was_traced():
    params, specs, optimizer = {"w": torch.eye(4)}, {"w": P()}, optim.adamw(1e-2)
    loss = ft.mean_gradients(lambda p, b, k: ((b["x"] @ p["w"]) ** 2).sum(), lambda b: b["x"].sum())
    step = ft.make_step(loss, optimizer, Mesh(), specs, batch_specs=P())
    zero = torch.zeros((), dtype=torch.int64)
    state = ft.State(zero, params, optimizer.init(params), random.key(0))
    program = trace(step)(state, {"x": torch.ones(2, 4)})
    got, want = (p(state, {"x": torch.ones(2, 4)}) for p in (parse(str(program)), program))
    torch.testing.assert_close(tree.leaves(got), tree.leaves(want), rtol=0, atol=0)


def test_other_arguments_of_a_read_program_are_named():
    read = parse(str(trace(lambda p, k: p["w"] * p["b"] * k)({"w": X, "b": X}, 2)))
    with pytest.raises(ValueError, match=r"0/b: got nothing.*\n.*0/c: got a leaf"):
        read({"w": X, "c": X}, 2)
    with pytest.raises(ValueError, match=r"argument 1: got 3; wanted 2"):
        read({"w": X, "b": X}, 3)
    with pytest.raises(ValueError, match=r"0/b: got 1\.0; wanted a tensor"):
        read({"w": X, "b": 1.0}, 2)
    table = X + 1
    with pytest.raises(ValueError, match=r"a constant .*without numbers.*as an argument"):
        parse(str(trace(lambda x: x * table)(X)))(X)
