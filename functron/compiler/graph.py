"""CUDA graphs: the launches of a whole program, recorded once and made at once from then on.

A step of small kernels is bounded by the time that Python and the driver take to launch them. A
graph launches all of them by one call, on the same memory each time (`torch.cuda.CUDAGraph`).

| tensors                              | in a graph                                             |
|--------------------------------------|--------------------------------------------------------|
| donated arguments                    | read and written where they are: results take over     |
| arguments that stay the same tensor  | read where they are                                    |
| other arguments                      | copied into a buffer first                             |
| results in memory of their own       | copied out, since the next launch overwrites them      |
| random numbers                       | functions of a key (`functron.core.random`), an input  |

Recording runs nothing, so the first calls run as they would without: they load kernels and begin
the communication of process groups, which cannot be recorded.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterator

import torch

from functron.core.errors import Problem
from functron.program.equations import Code, Equation, Scan

WARM_UP_CALLS = 2
"""Calls before the one that is recorded."""

_MOVES = 4  # recordings after which a donated argument that still moves is a mistake

_RAGGED = "ragged_all_to_all"
_GROUPED = frozenset(("grouped_matmul", "grouped_matmul_weight"))
_READS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


def problems(program: Code) -> Iterator[Problem]:
    """Why a program cannot be recorded: numbers that the host reads, and memory of the host."""
    for given in program.inputs:
        if given.role == "argument" and given.var.device.type != "cuda":
            yield Problem(
                f"argument {given.path}",
                f"a tensor on {given.var.device}",
                "one on a CUDA GPU",
                "move it there",
            )
    for equation, _ in program.block.walk():
        if not isinstance(equation.op, Scan) and (reason := _reason(equation)):
            got, fix = reason
            where = equation.where.line or "an unknown line"
            yield Problem(f"{equation.name} at {where}", got, "launches alone", fix)


def _reason(equation: Equation) -> tuple[str, str] | None:
    """Why an equation cannot be recorded, and what to do instead."""
    assert not isinstance(equation.op, Scan)
    if equation.name == _RAGGED and not any(equation.args[6:]):  # the room for rows of each rank
        fix = "bound what ranks send, such as by capacity_factor, or graph=False"
        return "as many rows as there are, which the host reads", fix
    if equation.name == "debug_print" or _READS.intersection(equation.op.tags):
        return "numbers that the host reads", "leave it out, or graph=False"
    if equation.name in _GROUPED and not _by_kernel(equation):
        fix = "compute in bfloat16 with rows of whole 16 bytes, or graph=False"
        return "sizes of groups that the host reads", fix
    there = {value.device.type for value in equation.operands}
    here = {value.device.type for value in equation.results}
    if equation.name in ("_to_copy", "copy_", "copy") and there | here != here & there:
        return "a copy between host and device", "make it where it is used, or graph=False"
    return None


def _by_kernel(equation: Equation) -> bool:
    """Whether torch's kernel computes a grouped product; see `functron.ops.grouped_matmul`."""
    x, y = equation.operands[:2]
    aligned = x.shape[-1] % 8 == 0 and y.shape[-1] % 8 == 0
    return x.dtype == torch.bfloat16 and aligned and len(equation.operands[2].shape) == 1


def record(
    run: Callable[[list], list], tensors: list[torch.Tensor]
) -> tuple[list, Callable[[], None]]:
    """The results of ``run(tensors)``, computed by each call of what is returned beside them."""
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        # other threads, which pin batches and write checkpoints, go on
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run(list(tensors))
    return results, graph.replay


class Graph:
    """A function of tensors, launched as one CUDA graph after its first calls.

    The graph keeps its memory, and that of the arguments that it reads where they are. It is
    recorded anew, which takes as long as a few calls, where one of these is elsewhere.

    Args:
        run: takes a list of tensors, which it may empty, and gives the results. What it reads of
            them but their addresses is the same in every call.
        donated: positions of the tensors whose memory results may take.
        name: of the program, for messages.
    """

    def __init__(self, run: Callable[[list], list], donated: Collection[int], name: str):
        self._run, self._donated, self._name = run, frozenset(donated), name
        self._num_calls = self._num_recorded = 0
        self._moving: set[int] = set()
        self._taken: set[int] = set()
        self._seen: list[Callable[[], torch.Tensor | None]] = []
        self._inputs: list[torch.Tensor] = []
        self._results: list = []
        self._launch: Callable[[], None] | None = None

    def run(self, tensors: list[torch.Tensor]) -> list:
        """The results; `tensors` is emptied, donated ones are overwritten.

        Raises:
            RuntimeError: CUDA cannot record what is launched.
        """
        self._num_calls += 1
        if self._num_calls <= WARM_UP_CALLS:
            self._seen = [weakref.ref(tensor) for tensor in tensors]
            return self._run(tensors)
        if self._launch is None or self._moved(tensors):
            self._recorded(tensors)
        for position in self._moving:
            _memory(self._inputs[position]).copy_(_memory(tensors[position]))
        tensors.clear()
        assert self._launch is not None
        self._launch()
        kept = {_address(self._inputs[position]) for position in self._taken}
        return [_given(result, kept) for result in self._results]

    def _moved(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a tensor that is read where it was is elsewhere."""
        rows = enumerate(zip(tensors, self._inputs, strict=True))
        moved = {
            position
            for position, (tensor, known) in rows
            if position not in self._moving and tensor.data_ptr() != known.data_ptr()
        }
        self._moving |= moved - self._taken
        if moved & self._taken and self._num_recorded == _MOVES:
            warnings.warn(
                f"{self._name}: got donated arguments in other memory for the {_MOVES}th time, and "
                "each time its CUDA graph is recorded anew; wanted the results of the last call; "
                "fix: pass these, or graph=False",
                stacklevel=2,
            )
        return bool(moved)

    def _recorded(self, tensors: list[torch.Tensor]) -> None:
        if self._num_recorded == 0:
            same = [tensor is seen() for tensor, seen in zip(tensors, self._seen, strict=True)]
            self._moving = {i for i, stays in enumerate(same) if not stays} - self._donated
            self._seen = []
        self._launch, self._results, self._inputs = None, [], []  # the memory of the graph before
        self._inputs = [
            _buffer(tensor) if position in self._moving else tensor
            for position, tensor in enumerate(tensors)
        ]
        self._results, self._launch = record(self._run, self._inputs)
        made = {_address(result) for result in self._results if isinstance(result, torch.Tensor)}
        self._taken = {i for i in self._donated if _address(self._inputs[i]) in made}
        self._num_recorded += 1


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _given(result: object, kept: Collection[int]) -> object:
    """A result as the caller's: another tensor in donated memory, or else a copy."""
    if not isinstance(result, torch.Tensor):
        return result
    return result.detach() if _address(result) in kept else result.clone()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements from a tensor's first to its last in memory, with those between them."""
    if tensor.numel() == 0:
        return tensor.flatten()
    rows = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.as_strided((1 + sum((size - 1) * step for size, step in rows),), (1,))


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the same layout."""
    return _memory(tensor).clone().as_strided(tensor.shape, tensor.stride())
