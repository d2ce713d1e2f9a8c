"""Text back to programs: the inverse of `functron.program.text.format`.

A `TextLine` is read from left to right: names, values, types, comments.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast, get_args

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from functron.core import tree
from functron.core.errors import refuse
from functron.core.scopes import Phase
from functron.program.equations import (
    Block,
    Equation,
    Input,
    Output,
    Scan,
    Switch,
    TensorType,
    Var,
    Where,
    While,
    contiguous_strides,
)
from functron.program.text import (
    DTYPES,
    Opaque,
    axis_of,
    dtype_text,
    payload_bytes,
    span_bytes,
    type_text,
)
from functron.program.trace import Program
from functron.spmd.mesh import Mesh
from functron.spmd.spec import P, Uneven

_STRING = r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
_NUMBER = r"(-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?))(?![\w.])"
_SIZES = r"(?:\d{1,18},)*(?:\d{1,18})?"
_DIGITS = 40
_MOST_BYTES = 1 << 60  # torch counts in 64 bits
_WORD = r"[\w./<>+*-]+"
_VALUE = "a value: %name, a number, a string, [..], (..), P(..), a dtype, a layout or a device"


class TextLine:
    """A line and how far it has been read.

    Attributes:
        text: the line without the spaces around it.
        at: the position up to which it has been read.
    """

    def __init__(self, number: int, text: str):
        self.number, self.text, self.at = number, text.strip(), 0

    def fail(self, wanted: str, got: str = "", fix: str = "") -> NoReturn:
        """Raise a ValueError: got the rest of the line, wanted something else."""
        rest = self.text[self.at :].strip()
        got = got or (repr(rest) if rest else "the end of the line")
        refuse("cannot parse the program", f"line {self.number}", got, wanted, fix)

    def match(self, pattern: str) -> re.Match | None:
        """Step over `pattern` and the spaces before it, if it comes next."""
        found = re.compile(rf"\s*(?:{pattern})").match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def take(self, pattern: str, wanted: str) -> re.Match:
        """Step over `pattern`, which must come next."""
        return self.match(pattern) or self.fail(wanted)

    def end(self) -> None:
        """Check that nothing follows."""
        if self.text[self.at :].strip():
            self.fail("the end of the line")

    def word(self, wanted: str, pattern: str = _WORD) -> str:
        """A plain or quoted word."""
        if quoted := self.match(_STRING):
            return self._literal(quoted[1])
        return self.take(f"({pattern})", wanted)[1]

    def _literal(self, text: str) -> Any:
        try:
            return ast.literal_eval(text)
        except (SyntaxError, ValueError):
            self.fail("a Python literal", got=text)

    # --- values

    def value(self, lookup: Callable[[str], Var]) -> Any:
        """A variable, which `lookup` finds by its name, or a constant."""
        if name := self.match(r"%(\w+)"):
            return lookup(name[1])
        if text := self.match(_STRING):
            return self._literal(text[1])
        if number := self.match(_NUMBER):
            if not re.fullmatch(r"-?\d+", number[1]):
                return float(number[1])
            if len(number[1]) > _DIGITS:
                self.fail(f"a number of at most {_DIGITS} digits", got=number[1][:_DIGITS] + "...")
            return int(number[1])
        if self.match(r"\["):
            return self._read_sequence(lookup, r"\]")
        if self.match(r"\("):
            return tuple(self._read_sequence(lookup, r"\)"))
        if self.match(r"P\("):
            return self._make_spec(P, self._read_sequence(lookup, r"\)"))
        if self.match(r"Uneven\("):
            return self._make_spec(Uneven, self._read_sequence(lookup, r"\)"))
        if self.match(r"complex\("):
            parts = self._read_sequence(lookup, r"\)")
            if [type(part) for part in parts] != [float, float]:
                self.fail("complex(REAL, IMAGINARY), of two floats", got=repr(parts))
            return complex(*parts)
        if self.match(r"opaque\("):
            text = self.take(rf"{_STRING}\)", "opaque('...')")
            return Opaque(self._literal(text[1]))
        return self._read_name()

    def _read_sequence(self, lookup: Callable[[str], Var], close: str) -> list:
        values = []
        while not self.match(close):
            values.append(self.value(lookup))
            if not self.match(","):
                self.take(close, f"',' or {close[-1]!r}")
                break
        return values

    def _make_spec(self, make: type, entries: list) -> Any:
        wanted = "P of axis names, tuples of them, None, and Uneven of names and a size"
        try:
            return make(*entries)
        except (TypeError, ValueError) as error:
            self.fail(wanted, got=str(error))

    def _read_name(self) -> Any:
        start = self.at
        name = self.take(r"([a-z]\w*(?::\d+)?|True|False|None)", _VALUE)[1]
        if name in ("True", "False", "None"):
            return ast.literal_eval(name)
        found = _dtype(name) or getattr(torch, name, None)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
        try:
            return torch.device(name)
        except RuntimeError:
            self.at = start
            self.fail(_VALUE)

    def spec(self) -> P | None:
        """A partition spec; None where none comes next."""
        return self.value(self.no_variable) if self.match(r"(?=P\()") else None

    def no_variable(self, name: str) -> NoReturn:
        """The lookup where a constant is wanted."""
        self.fail("a constant", got=f"%{name}")

    # --- declarations and comments

    def declared(self) -> tuple[str, TensorType]:
        """``%name: type``."""
        name = self.take(r"%(\w+):", "%name: type")[1]
        return name, self.type()

    def result(self) -> tuple[str, TensorType] | None:
        """``%name: type``; None for ``_``."""
        return None if self.match(r"_(?!\w)") else self.declared()

    def type(self) -> TensorType:
        """``dtype[shape]{strides}@device``."""
        found = self.take(
            rf"(\w+)\[({_SIZES})\](?:\{{({_SIZES})\}})?(?:@(\w+(?::\d{{1,3}})?))?",
            "a type, such as f32[4,8]",
        )
        dtype = _dtype(found[1])
        if dtype is None:
            self.fail("a type, such as f32[4,8]", got=repr(found[0].strip()))
        shape = _numbers(found[2])
        stride = contiguous_strides(shape) if found[3] is None else _numbers(found[3])
        if len(stride) != len(shape):
            self.fail(f"{len(shape)} strides", got=repr(found[0].strip()))
        kind = TensorType(shape, stride, dtype, torch.device(found[4] or "cpu"))
        if max((span_bytes(kind), *shape, *stride)) > _MOST_BYTES:
            self.fail(f"at most {_MOST_BYTES} bytes", got=repr(found[0].strip()))
        return kind

    def where(self) -> Where:
        """The comment of an equation, without its remark on bytes."""
        if not self.match("#"):
            return Where()
        found = self.take(f"({'|'.join(get_args(Phase))})", "forward, recompute or backward")
        scopes = self._read_field("named scopes", _WORD)
        line = self._read_field("file:line", r"[\w./<>+*:-]+")
        return Where(cast(Phase, found[1]), tuple(scopes.split("/")) if scopes else (), line)

    def _read_field(self, wanted: str, pattern: str) -> str:
        at_end = not self.text[self.at :].strip()
        return "" if at_end or self.match(r"-(?!\S)") else self.word(wanted, pattern)


def _dtype(name: str) -> torch.dtype | None:
    found = DTYPES.get(name) or getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) and dtype_text(found) == name else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def parse(text: str) -> Program:
    """The program that `functron.program.text.format` wrote as `text`.

    ``format(parse(text)) == text`` for the text of any program. Operations are run on fake tensors
    to check shapes and dtypes and to find out which values share memory; strides are taken from the
    text. What the text does not hold is missing: constants have no value, `Where.line` is
    ``file.py:12``, and Python objects without a notation are `Opaque`. The types of containers are
    missing too: the program takes the arguments that were traced, and any trees whose leaves have
    their paths; results come in tuples where keys count up from 0, and in dicts elsewhere, with the
    paths and in the order of the traced program's.

    Raises:
        ValueError: the text is no program, or not a consistent one; with the number of the line,
            what stands there and what was wanted.
    """
    return _Parser(text).program()


def structure(paths: Sequence[str]) -> tree.Structure:
    """A tree whose leaves have these paths, in this order; a flat tuple where none has."""
    root: OrderedDict[str, Any] = OrderedDict()
    for path in paths:
        node = root
        *above, last = path.split("/")
        for key in above:
            node = node.setdefault(key, OrderedDict())
            if not isinstance(node, OrderedDict):
                return tree.structure((0,) * len(paths))
        node.setdefault(last, 0)
    built = _make_tuples(root)[""] if list(paths) == [""] else _make_tuples(root)
    if tree.paths(built) != list(paths):
        return tree.structure((0,) * len(paths))
    return tree.structure(built)


def _make_tuples(node: Any) -> Any:
    if not isinstance(node, OrderedDict):
        return node
    children = OrderedDict((key, _make_tuples(child)) for key, child in node.items())
    counted = list(children) == [str(k) for k in range(len(children))]
    if counted:
        return tuple(children.values())
    return dict(children) if list(children) == sorted(children) else children


class _Scope:
    """The variables of a block that is being read, each with the fake tensor that it stands for."""

    def __init__(self):
        self.values: dict[str, tuple[Var, torch.Tensor]] = {}
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def lookup(self, line: TextLine) -> Callable[[str], Var]:
        """The function from a name in `line` to its variable."""

        def find(name: str) -> Var:
            if name not in self.values:
                close = difflib.get_close_matches(name, self.values, n=1)
                fix = f"did you mean %{close[0]}?" if close else ""
                line.fail("a variable of this block that is defined above", f"%{name}", fix)
            return self.values[name][0]

        return find

    def tensor(self, var: Var) -> torch.Tensor:
        return self.values[var.name][1]

    def define(self, line: TextLine, name: str, tensor: torch.Tensor) -> Var:
        if name in self.values:
            line.fail("a new name", f"%{name}, which an earlier line has defined")
        storage = tensor.untyped_storage()  # kept, so that no other takes its address
        number, _ = self._storages.setdefault(storage._cdata, (len(self._storages), storage))
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        var = Var(name, shape, stride, tensor.dtype, tensor.device, number, storage.nbytes())
        self.values[name] = var, tensor
        return var


class _Parser:
    """Reads the lines of a text in order."""

    def __init__(self, text: str):
        rows = [(number, row) for number, row in enumerate(text.splitlines(), 1) if row.strip()]
        self.lines = [TextLine(number, row) for number, row in rows]
        self.end = TextLine(rows[-1][0] + 1 if rows else 1, "")
        self.position = 0
        self.fake = FakeTensorMode()

    def peek(self, wanted: str) -> TextLine:
        if self.position == len(self.lines):
            self.end.fail(wanted, "the end of the text")
        return self.lines[self.position]

    def next(self, wanted: str) -> TextLine:
        line = self.peek(wanted)
        self.position += 1
        return line

    def section(self, name: str) -> None:
        line = self.next(f"'{name}:'")
        line.take(f"{name}:", f"'{name}:'")
        line.end()

    # --- the parts of a program

    def program(self) -> Program:
        line = self.next("'program NAME on Mesh(...)'")
        line.take(r"program\b", "'program NAME on Mesh(...)'")
        name = line.word("the name of the program")
        mesh = self.mesh(line)
        count = int(line.take(r"(\d{1,9}) equations", "the number of equations")[1])
        checked = not line.match(", unchecked")
        line.match(r", (\d{1,18}) bytes of padding")  # which the specs say
        line.end()
        self.section("inputs")
        scope = _Scope()
        inputs, paths, static = self.inputs(scope)
        self.section("equations")
        equations = self.equations(scope, "outputs:")
        self.section("outputs")
        outputs = self.outputs(scope)
        values = tuple(entry.value for entry in outputs)
        block = Block(tuple(entry.var for entry in inputs), equations, values)
        if count != (found := sum(1 for _ in block.walk())):
            line.fail(f"{found}, as many as the text has", f"{count} equations")
        return Program(
            name,
            mesh,
            block,
            inputs,
            outputs,
            structure(paths),
            structure([entry.path for entry in outputs]),
            static,
            checked,
            paths=tuple(paths),
        )

    def mesh(self, line: TextLine) -> Mesh:
        """``on Mesh(dp=2, tp=4):``."""
        text = line.take(r"on Mesh\(([^)]*)\):", "'on Mesh(axis=size, ...):'")[1]
        entries = [entry.partition("=") for entry in text.split(", ") if entry]
        if not all(re.fullmatch(r"0*[1-9]\d{0,8}", size) for _, _, size in entries):
            line.fail("Mesh(axis=size, ...)", f"Mesh({text})")
        return Mesh(**{name: int(size) for name, _, size in entries})

    def inputs(self, scope: _Scope) -> tuple[tuple[Input, ...], list[str], dict[int, Any]]:
        """The inputs, the paths of all arguments, and the static ones by position."""
        inputs: list[Input] = []
        paths: list[str] = []
        static = {}
        while not (line := self.peek("'equations:'")).text.startswith("equations:"):
            self.position += 1
            if not line.text.startswith("%"):
                static[len(paths)] = line.value(line.no_variable)
                paths.append(line.word("the path of the argument"))
                line.take("static", "'static' after an argument that is no tensor")
                line.end()
                continue
            name, kind = line.declared()
            path, spec = line.word("the path of the input"), line.spec()
            line.match(r"with (\d{1,18}) bytes of padding")  # which the spec says
            role = "constant" if line.match("constant") else "argument"
            role = "axis_index" if line.match("axis_index") else role
            donated = bool(line.match("donated"))
            inputs.append(Input(self.enter(line, scope, name, kind), path, spec, donated, role))
            paths += [path] if role == "argument" else []
        return tuple(inputs), paths, static

    def outputs(self, scope: _Scope) -> tuple[Output, ...]:
        outputs = []
        while self.position < len(self.lines):
            line = self.next("an output")
            value = line.value(scope.lookup(line))
            if isinstance(value, Var):
                line.take(":", "%name: type")
                self.check_type(line, value, line.type())
            path = line.word("the path of the output")
            outputs.append(Output(value, path, line.spec()))
            line.end()
        return tuple(outputs)

    def enter(self, line: TextLine, scope: _Scope, name: str, kind: TensorType) -> Var:
        """An input of a block, with the remarks on its memory that end the line."""
        if owner := line.match(r"shares %(\w+)"):
            whole = scope.tensor(scope.lookup(line)(owner[1]))
        else:
            size = line.match(r"of (\d{1,18}) bytes")
            whole = self.memory(int(size[1]) if size else span_bytes(kind), kind.device)
        line.end()
        return scope.define(line, name, self.on_memory(whole, kind))

    def memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        with self.fake:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def on_memory(self, whole: torch.Tensor, kind: TensorType) -> torch.Tensor:
        with self.fake:
            tensor = torch.empty(0, dtype=kind.dtype, device=kind.device)
            return tensor.set_(whole.untyped_storage(), 0, kind.shape, kind.stride)

    def check_type(self, line: TextLine, var: Var, kind: TensorType) -> None:
        if var.type != kind:
            line.fail(f"{type_text(var)}, which {var!r} is", type_text(kind))

    # --- equations

    def equations(self, scope: _Scope, end: str) -> tuple[Equation, ...]:
        """Equations up to the line that starts with the pattern `end`."""
        found = []
        while not re.match(end, (line := self.peek("an equation")).text):
            self.position += 1
            flow = re.match(r"(scan|switch|while)\[", line.text)
            read = self.equation
            if flow:
                read = {"scan": self.scan, "switch": self.switch, "while": self.loop}[flow[1]]
            found.append(read(line, scope))
        return tuple(found)

    def equation(self, line: TextLine, scope: _Scope) -> Equation:
        """``%name: type, ... = op(...)  # comment``."""
        results = []
        if re.match(r"%|_(?!\w)", line.text):
            results.append(line.result())
            while line.match(","):
                results.append(line.result())
            line.take("=", "'= op(...)'")
        op = self.op(line)
        args, kwargs = self.arguments(line, scope)
        outputs = self.run(line, scope, op, args, kwargs, results) if results else ()
        equation = Equation(op, args, kwargs, outputs, line.where())
        if payload := line.match(r"(\d+) bytes over (\S+)"):
            self.check_payload(line, equation, payload[0].strip())
        line.end()
        return equation

    def check_payload(self, line: TextLine, equation: Equation, text: str) -> None:
        axis = axis_of(equation)
        if axis is None:
            line.fail("nothing: this is no collective", repr(text))
        if text != (right := f"{payload_bytes(equation)} bytes over {axis}"):
            line.fail(repr(right), repr(text))

    def op(self, line: TextLine) -> torch._ops.OpOverload:
        """The operation of a name such as ``mm``, ``add.Tensor`` or ``prims::sum``."""
        name = line.take(r"((?:\w+::)?\w+(?:\.\w+)?)\(", "an equation: %name: type = op(...)")[1]
        namespace, _, short = name.rpartition("::")
        short, _, overload = short.partition(".")
        for space in [namespace] if namespace else ["functron", "aten"]:
            packet = getattr(getattr(torch.ops, space), short, None)
            op = getattr(packet, overload or "default", None) if packet is not None else None
            if op is not None:
                return op
        return line.fail("an operation of torch.ops, such as mm or add.Tensor", repr(name))

    def arguments(self, line: TextLine, scope: _Scope) -> tuple[tuple, dict[str, Any]]:
        """``operand, keyword=value)``."""
        args, kwargs = [], {}
        while not line.match(r"\)"):
            if args or kwargs:
                line.take(",", "',' or ')'")
            keyword = line.match(r"(\w+)=")
            value = line.value(scope.lookup(line))
            if keyword:
                kwargs[keyword[1]] = value
            else:
                args.append(value)
        return tuple(args), kwargs

    def run(
        self, line: TextLine, scope: _Scope, op, args, kwargs, results
    ) -> tuple[Var | None, ...]:
        """The results of an operation, which is run on the fake tensors of its operands."""
        tensors = pytree.tree_map_only(Var, scope.tensor, (args, kwargs))
        try:
            with self.fake:
                out = op(*tensors[0], **tensors[1])
        except Exception as error:  # whatever a kernel raises where operands do not fit
            reason = str(error).strip().splitlines()[0]
            line.fail("operands that it takes", f"{op}, which refuses its operands ({reason})")
        leaves = pytree.tree_leaves(out)
        if len(leaves) != len(results):
            line.fail(f"{len(leaves)}, as {op} returns", f"{len(results)} results")
        outputs: list[Var | None] = []
        for leaf, declared in zip(leaves, results, strict=True):
            if declared is None:
                outputs.append(None)
                continue
            name, kind = declared
            if not isinstance(leaf, torch.Tensor):
                line.fail(f"_: {op} returns no tensor there", f"%{name}")
            same = tuple(leaf.shape) == kind.shape
            if same and leaf.dtype == kind.dtype and leaf.stride() != kind.stride:
                leaf = self.on_memory(leaf, kind)
            var = scope.define(line, name, leaf)
            self.check_type(line, var, kind)
            outputs.append(var)
        return tuple(outputs)

    def scan(self, line: TextLine, scope: _Scope) -> Equation:
        length = int(line.take(r"scan\[length=(\d{1,18})", "scan[length=N]")[1])
        reverse = bool(line.match(", reverse"))
        name, where = self.opening_end(line, "length and reverse")
        inner, outputs = _Scope(), []
        kinds, inputs, args = self.operands(line, scope, inner, ["const", "carry", "x"], length)
        equations = self.equations(inner, r"\}|(?:carry|y) ")
        values = self.results(scope, inner, outputs, "carry|y", "}", length)
        body = Block(inputs, equations, values)
        scan = Scan(body, length, kinds.count("const"), kinds.count("carry"), reverse, name)
        return Equation(scan, args, {}, tuple(outputs), where)

    def switch(self, line: TextLine, scope: _Scope) -> Equation:
        line.take(r"switch\[on=", "switch[on=%index, branches=N]")
        index = line.value(scope.lookup(line))
        count = int(line.take(r", branches=(\d{1,6})", "', branches=N'")[1])
        weights = line.value(line.no_variable) if line.match(", weights=") else ()
        name, where = self.opening_end(line, "index, branches and weights")
        if not count or (weights and (not isinstance(weights, tuple) or len(weights) != count)):
            line.fail("at least one branch, and as many weights", f"{count}, and {weights}")
        branches, outputs, given = [], [], None
        for position in range(count):
            inner = _Scope()
            _, inputs, args = self.operands(line, scope, inner, ["const"])
            if given is not None and args != given:
                line.fail("the same operands for every branch", f"others for branch {position}")
            given = args
            equations = self.equations(inner, r"\}|y ")
            end = "}" if position == count - 1 else "} or {"
            values = self.results(scope, inner, outputs, "y", end)
            if len(values) != len(outputs):
                line.fail(f"{len(outputs)} results of every branch", f"{len(values)} of {position}")
            branches.append(Block(inputs, equations, values))
        made = Switch(tuple(branches), weights, name)
        return Equation(made, (index, *(given or ())), {}, tuple(outputs), where)

    def loop(self, line: TextLine, scope: _Scope) -> Equation:
        line.take(r"while\[", "while[trips=N]")
        trips = line.match(r"trips=(\d{1,18})")
        name, where = self.opening_end(line, "trips")
        inner, outputs = _Scope(), []
        kinds, inputs, args = self.operands(line, scope, inner, ["const", "carry"])
        equations = self.equations(inner, "test ")
        row = self.next("'test %name'")
        row.take("test ", "'test %name'")
        holds = row.value(inner.lookup(row))
        row.end()
        if not isinstance(holds, Var) or (holds.shape, holds.dtype) != ((), torch.bool):
            row.fail("one bool[]", "something else")
        cond, row = Block(inputs, equations, (holds,)), self.next("'} do {'")
        row.take(r"\} do \{", "'} do {'")
        row.end()
        inner = _Scope()
        again, inputs, others = self.operands(line, scope, inner, ["const", "carry"])
        if (again, others) != (kinds, args):
            line.fail("the same operands for the condition and the body", "others")
        equations = self.equations(inner, r"\}|carry ")
        values = self.results(scope, inner, outputs, "carry", "}")
        if len(values) != kinds.count("carry"):
            line.fail(f"{kinds.count('carry')} results, as many as are carried", f"{len(values)}")
        count = int(trips[1]) if trips else None
        made = While(cond, Block(inputs, equations, values), kinds.count("const"), count, name)
        return Equation(made, args, {}, tuple(outputs), where)

    def opening_end(self, line: TextLine, after: str) -> tuple[str, Where]:
        """The name and the comment of what runs blocks, from ``] name {``."""
        line.take(r"\]", f"']' after {after}")
        name = line.word("the name of the function")
        line.take(r"\{", "'{'")
        where = line.where()
        line.end()
        return name, where

    def operands(
        self, line: TextLine, scope: _Scope, inner: _Scope, order: list[str], length: int = 0
    ) -> tuple[list[str], tuple[Var, ...], tuple[Any, ...]]:
        """The operands of a block: their kinds, its inputs, and what they are outside."""
        kinds, inputs, args = [], [], []
        while found := re.match(rf"({'|'.join(order)}) +%\w+:", self.peek("'}'").text):
            row = self.next("an operand")
            row.take(found[1], "an operand")
            kinds.append(found[1])
            inner_name, kind = row.declared()
            row.take("=", "'= operand'")
            args.append(row.value(scope.lookup(row)))
            inputs.append(self.enter(row, inner, inner_name, kind))
            self.check_slice(row, inputs[-1], args[-1], length if found[1] == "x" else None)
        if kinds != sorted(kinds, key=order.index):
            line.fail(", then ".join(order), f"operands in the order {', '.join(kinds)}")
        return kinds, tuple(inputs), tuple(args)

    def results(
        self,
        scope: _Scope,
        inner: _Scope,
        outputs: list,
        kinds: str,
        end: str,
        length: int | None = None,
    ) -> tuple:
        """A block's results, up to the line `end`; the variables that they become: `outputs`.

        The first block of an operation defines these variables.
        """
        values, known = [], {v.name: v for v in outputs if v is not None}
        while (row := self.next(repr(end))).text != end:
            like = f"'{kinds.split('|')[0]} %inner -> %outer: type'"
            kind = row.take(f"({kinds}) ", f"{like} or {end!r}")[1]
            values.append(row.value(inner.lookup(row)))
            row.take("->", "'-> %outer: type'")
            declared = row.result()
            row.end()
            if declared is None:
                outputs += [None] if len(values) > len(outputs) else []
                continue
            if declared[0] in known and len(values) <= len(outputs):
                var = outputs[len(values) - 1]
                if var is not known[declared[0]]:
                    row.fail("the results in the order of the first branch", f"%{declared[0]}")
                self.check_type(row, var, declared[1])
            else:
                whole = self.memory(span_bytes(declared[1]), declared[1].device)
                var = scope.define(row, declared[0], self.on_memory(whole, declared[1]))
                outputs.append(var)
            self.check_slice(row, values[-1], var, length if kind == "y" else None)
        return tuple(values)

    def check_slice(self, line: TextLine, inner: Any, outer: Any, length: int | None) -> None:
        """Check that `outer` is as `inner`, or a stack of `length` such values."""
        if isinstance(inner, Var) and isinstance(outer, Var):
            stack = () if length is None else (length,)
            shape = (*stack, *inner.shape)
            if (outer.shape, outer.dtype) != (shape, inner.dtype):
                line.at = 0
                wanted = TensorType(shape, contiguous_strides(shape), inner.dtype, outer.device)
                line.fail(f"{outer!r} to be {type_text(wanted)} there")
