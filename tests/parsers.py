"""Damaged files for everything that reads one: it reads them, or says what is wrong with them.

    python -m tests.parsers                      # 2,000 inputs for each
    python -m tests.parsers safetensors 100000   # so many for one
    python -m tests.parsers idx 100000 --guided  # inputs that reach new code are kept (atheris)

An input is a valid one with some bytes, or values of its JSON, changed. Anything but a ValueError
that says what was wanted is a failure, and so is what takes longer than `SLOW_SECONDS`. A new
reader of files from outside belongs into `TARGETS`; an input that failed into `FOUND`. Those of an
application are in its folder: tests/apps/NAME/parsers.py.
"""

from __future__ import annotations

import copy
import gc
import importlib
import importlib.util
import io
import json
import random
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import functron as ft
from functron import checkpoint, hub, optim
from functron.checkpoint.folder import MANIFEST
from functron.core.errors import raise_problems
from functron.data import indexed, shards
from functron.data.chat import ChatLine, read_conversations
from functron.data.text_files import read_jsonl, read_parquet
from functron.data.tokenizer import open_tokenizer
from functron.hub import files
from functron.pipeline.partition import parse_layout
from functron.pipeline.schedule import Schedule
from functron.precision import Recipe
from functron.program.parse import parse
from functron.training import config, records
from tests.transforms.flow_programs import loop, switch

SLOW_SECONDS = 10.0


class Target(NamedTuple):
    """A reader of files.

    Attributes:
        seeds: valid inputs; the folder is theirs to work in.
        read: ``(folder, input)``: reads all that the input says.
    """

    seeds: Callable[[Path], list[bytes]]
    read: Callable[[Path, bytes], object]


def put(folder: Path, name: str, data: bytes) -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def _safetensors(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _safetensors_seeds(folder: Path) -> list[bytes]:
    del folder
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    other = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
    table = {"a": tensor, "b.weight": other, "__metadata__": {"format": "pt"}}
    return [_safetensors(table, bytes(32)), _safetensors({}, b"")]


def _read_safetensors(folder: Path, data: bytes) -> None:
    put(folder, files.SINGLE, data)
    found = files.open_folder(folder)
    for name, (shape, _) in found.shapes().items():
        found.read(name, [slice(0, size) for size in shape])


def _index_seeds(folder: Path) -> list[bytes]:
    del folder
    table = {"metadata": {"total_size": 24}, "weight_map": {"a": "x.safetensors"}}
    return [json.dumps(table).encode()]


def _read_index(folder: Path, data: bytes) -> None:
    table = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    put(folder, "x.safetensors", _safetensors(table, bytes(24)))
    put(folder, files.INDEX, data)
    source = files.open_folder(folder)
    with mock.patch.object(files.Stored, "read", lambda self, slices: self.file):
        for name in source.shapes():
            file: Any = source.read(name, ())
            assert file.parent == folder, f"it leaves the folder: {file}"


def _idx_seeds(folder: Path) -> list[bytes]:
    found = []
    for modes in (False, True):
        with indexed.IndexedWriter(folder / f"t{modes}", np.uint16, modes=modes) as writer:
            for lengths, tokens in (([3, 1], [1, 2, 3, 4]), ([2], [5, 6])):
                writer.add(tokens, lengths, [0] * len(lengths) if modes else None)
        found.append((folder / f"t{modes}.idx").read_bytes())
    return found


def _read_idx(folder: Path, data: bytes) -> None:
    put(folder, "x.bin", np.arange(6, dtype=np.uint16).tobytes())
    put(folder, "x.idx", data)
    opened = indexed.IndexedFile(folder / "x")
    shards.verify(folder / "x")
    for index in range(min(opened.num_documents, 50)):
        opened.document(index)


def _record_seeds(folder: Path) -> list[bytes]:
    with indexed.IndexedWriter(folder / "tokens", np.uint16) as writer:
        writer.add([1, 2, 3])
    made = {"tokenizer": "a.json", "pattern": "", "tokenizer_sha256": "00", "tokens": 3}
    pair = [folder / "tokens.bin", folder / "tokens.idx"]
    return [json.dumps(shards.with_checksums(made, pair)).encode()]


def _read_record(folder: Path, data: bytes) -> None:
    """As it is, and as one who knows how would have it: with the checksum of what it says."""
    try:
        content = json.loads(data)
        content.pop("crc32")
        crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        data = json.dumps({**content, "crc32": crc}).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    put(folder, "tokens.json", data)
    shards.verify(folder / "tokens")
    found = shards.provenance([folder / "tokens"])
    assert found is None or not found.is_there


_TOML = b"""
steps = 20
data = "x.txt"
precision = "bf16"
[gpt]
num_layers = 2
embed_dim = 64
[gpt.moe]
num_experts = 4
[optimizer]
name = "adamw"
groups = "embed lr=0.1"
"""
_YAML = b"steps: 20\ngpt: &g\n  num_layers: 2\n  moe: {num_experts: 4}\noptimizer: {b1: 0.9}\n"


def _read_config(name: str) -> Callable[[Path, bytes], object]:
    return lambda folder, data: config.load(put(folder, name, data))


def _program_seeds(folder: Path) -> list[bytes]:
    del folder
    mesh = ft.Mesh(dp=2, tp=2)

    def mlp(w: dict, x: torch.Tensor) -> torch.Tensor:
        return ft.lax.psum(torch.relu(x @ w["up"]) @ w["down"], "tp")

    specs = {"up": ft.P(None, "tp"), "down": ft.P("tp", None)}
    step = ft.shard_map(mlp, mesh, in_specs=(specs, ft.P("dp")), out_specs=ft.P("dp"))
    weights = {"up": torch.randn(4, 8), "down": torch.randn(8, 4)}

    def flow(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = switch(i, [torch.sin, lambda x: x * 2], x)
        return loop(lambda c: c[1] < 3, lambda c: (c[0] * y, c[1] + 1), (y, i))[0]

    programs = (
        ft.trace(step)(weights, torch.randn(4, 4)),
        ft.trace(flow)(torch.tensor(0), torch.ones(4)),
    )
    return [str(program).encode() for program in programs]


def _text(read: Callable[[str], object]) -> Callable[[Path, bytes], object]:
    return lambda folder, data: read(data.decode("utf-8", "replace"))


_TABLE = b"""name: two
microbatches: 2
pipe: 0 1
F0 .
F1 F0
.  B0
B0 F1
.  B1
B1 .
"""


def _manifest_seeds(folder: Path) -> list[bytes]:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": {"c": torch.zeros(3)}}
    checkpoint.save(folder / "saved", state, {"step": 1, "mesh": ""})
    return [(folder / "saved" / MANIFEST).read_bytes()]


def _read_manifest(folder: Path, data: bytes) -> None:
    """As it is, and as one who knows how would have it: with the checksum of what it says."""
    saved = folder / "saved"
    try:
        content = json.loads(data)["content"]
        crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
        data = json.dumps({"crc32": crc, "content": content}).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    (saved / MANIFEST).write_bytes(data)
    opened = checkpoint.Checkpoint(saved)
    assert opened.metadata is not None
    for leaf in opened.values():
        leaf[...]


_WORDS = {"a": 0, "b": 1, "ab": 2, "<unk>": 3, "<|end|>": 4}


def _tokenizer_seeds(folder: Path) -> list[bytes]:
    del folder
    model = {"type": "BPE", "vocab": _WORDS, "merges": [["a", "b"]], "unk_token": "<unk>"}
    added = {"id": 4, "content": "<|end|>", "special": True, "single_word": False}
    added |= {"lstrip": False, "rstrip": False, "normalized": False}
    table = {"version": "1.0", "added_tokens": [added], "model": model}
    table |= dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return [json.dumps(table | {"truncation": None, "padding": None}).encode()]


def _read_tokenizer(folder: Path, data: bytes) -> None:
    tokenizer = open_tokenizer(put(folder, "tokenizer.json", data))
    tokenizer.decode(tokenizer.encode("abba"))


def _read_settings(folder: Path, data: bytes) -> None:
    put(folder, "tokenizer.json", _tokenizer_seeds(folder)[0])
    put(folder, "tokenizer_config.json", data)
    tokenizer: Any = open_tokenizer(folder)
    tokenizer.encode("ab")
    if tokenizer.template is not None:
        tokenizer.render([{"role": "user", "content": "hi"}])


def _settings_seeds(folder: Path) -> list[bytes]:
    del folder
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    named = [{"name": "default", "template": template}, {"name": "tool", "template": "x"}]
    tokens = {"eos_token": "<|end|>", "bos_token": {"content": "a", "lstrip": False}}
    return [json.dumps(tokens | {"chat_template": x}).encode() for x in (template, named)]


def _rank_file_seeds(folder: Path) -> list[bytes]:
    del folder
    lines = [b"YQ== 0", b"Yg== 1", b"YWI= 2"]
    return [b"\n".join(lines) + b"\n"]


def _read_rank_file(folder: Path, data: bytes) -> None:
    tokenizer = open_tokenizer(put(folder, "x.tiktoken", data), pattern="gpt2")
    tokenizer.decode(tokenizer.encode("abba"))


def _jsonl_seeds(folder: Path) -> list[bytes]:
    del folder
    return [b'{"text": "one"}\n\n{"text": "two \\u00e9", "more": [1, {"a": null}]}\n']


def _refuse_first(rows: Iterator[Any]) -> None:
    for row in rows:
        problems = row.problems if isinstance(row, ChatLine) else [row.problem] * bool(row.problem)
        raise_problems("a line cannot be read", problems)


def _chat_seeds(folder: Path) -> list[bytes]:
    del folder
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    return [json.dumps({"messages": turns}).encode() + b"\n"]


def _parquet_seeds(folder: Path) -> list[bytes]:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["one", "two", None, "three"], "n": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, folder / "seed.parquet", row_group_size=2)
    return [(folder / "seed.parquet").read_bytes()]


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _read_npy(folder: Path, data: bytes) -> None:
    opened = shards.open_tokens(put(folder, "x.npy", data))
    opened.read(0, min(opened.num_tokens, 50))


_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu", "tie_word_embeddings": True,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def _read_hub_config(folder: Path, data: bytes) -> None:
    put(folder, "config.json", data)
    hub.read_config(folder)


def _read_run(folder: Path, data: bytes) -> None:
    (folder / "run").mkdir(exist_ok=True)
    put(folder, "run/config.toml", _TOML)
    put(folder, "run/metrics.jsonl", data)
    records.compare([folder / "run"])


def _json(value: Any) -> Callable[[Path], list[bytes]]:
    return lambda folder: [json.dumps(value).encode()]


def given(*found: bytes) -> Callable[[Path], list[bytes]]:
    return lambda folder: list(found)


_METRICS = b'{"step": 1, "loss": 2.5, "grad_norm": 1.0, "tokens": 64, "eval": {"x": {"loss": 1}}}\n'

TARGETS: dict[str, Target] = {
    "safetensors": Target(_safetensors_seeds, _read_safetensors),
    "index": Target(_index_seeds, _read_index),
    "hub config": Target(_json(_LLAMA), _read_hub_config),
    "idx": Target(_idx_seeds, _read_idx),
    "record": Target(_record_seeds, _read_record),
    "npy": Target(given(_npy(np.arange(9, dtype=np.uint16))), _read_npy),
    "toml": Target(given(_TOML), _read_config("x.toml")),
    "yaml": Target(given(_YAML), _read_config("x.yaml")),
    "program": Target(_program_seeds, _text(parse)),
    "schedule": Target(given(_TABLE), _text(Schedule.parse)),
    "layout": Target(given(b"E|t*2|t|tt|L"), _text(lambda text: parse_layout(text, 5, 2))),
    "recipe": Target(
        given(b"fprop=e4m3@row*e4m3@row dgrad=high wgrad=high first=1"), _text(Recipe.parse)
    ),
    "mesh": Target(given(b"dp=2,tp=4"), _text(ft.Mesh.parse)),
    "groups": Target(
        given(b"embed lr=0.1; blocks/*/router/* lr=0.5 decay=0"),
        _text(
            lambda text: optim.make_optimizer(
                optim.OptimizerConfig("sgd", groups=text), 0.1, defs={}
            )
        ),
    ),
    "manifest": Target(_manifest_seeds, _read_manifest),
    "tokenizer": Target(_tokenizer_seeds, _read_tokenizer),
    "tokenizer settings": Target(_settings_seeds, _read_settings),
    "rank file": Target(_rank_file_seeds, _read_rank_file),
    "jsonl": Target(
        _jsonl_seeds, lambda folder, data: _refuse_first(read_jsonl(put(folder, "x.jsonl", data)))
    ),
    "chat": Target(
        _chat_seeds,
        lambda folder, data: _refuse_first(read_conversations([put(folder, "x.jsonl", data)])),
    ),
    "parquet": Target(
        _parquet_seeds,
        lambda folder, data: _refuse_first(read_parquet(put(folder, "x.parquet", data))),
    ),
    "metrics": Target(given(_METRICS), _read_run),
}

_HEADER = b"{'descr': '<u2', 'fortran_order': False, 'shape': (9,,), }"
_SAVED = {"format": 1, "metadata": {}, "origin": {}, "leaves": {}, "files": {}}
_LEAF = {"shape": [2, 3], "dtype": "float32", "chunk": [2, 3], "crc32c": []}


def _manifest(**changes: Any) -> bytes:
    return json.dumps({"crc32": 0, "content": _SAVED | changes}).encode()


def _program(kind: str) -> bytes:
    return f"program f on Mesh(dp=2): 0 equations\ninputs:\n  %x: {kind}  0  P()\n".encode()


FOUND: dict[str, list[bytes]] = {
    "toml": [b"a = " + b"[" * 100_000, b'{"a":' * 100_000],
    "yaml": [b"a: " + b"[" * 1500, b'{"a":' * 1500],
    "hub config": [json.dumps(_LLAMA | {"rope_scaling": {"rope_type": {}}}).encode()],
    "npy": [b"\x93NUMPY\x01\x00v\x00" + _HEADER[:-4].ljust(117) + b"\n" + bytes(18)],
    "layout": [b"t*2|*" + b"8" * 25, b"(t*1000)*1000000|t", b"t*" + b"9" * 5000],
    "program": [_program(f"f32[{n}]") for n in ("2" * 130, "9" * 5000, "4294967296,4294967296")],
    "manifest": [
        b"[" * 100_000,
        _manifest(files={"manifest.ocdbt": 1}),
        _manifest(files={"../seed": {"size": 1}}),
        _manifest(files=[]),
        _manifest(leaves={"a": _LEAF}),
        _manifest(leaves={"a": {}}),
    ],
    "tokenizer settings": [
        b"[" * 100_000,
        b'{"chat_template": [{"name": "default"}]}',
        b'{"chat_template": 1}',
        b'{"chat_template": "{{ 1/0 }}"}',
        b'{"eos_token": {"content": []}}',
    ],
}
"""Inputs that once were neither read nor refused, by target."""


def find_tables() -> tuple[dict[str, Target], dict[str, list[bytes]]]:
    """`TARGETS` and `FOUND`, with those of the applications that are there."""
    targets, found = dict(TARGETS), dict(FOUND)
    for path in sorted(Path(__file__).parent.glob("apps/*/parsers.py")):
        own = importlib.import_module(f"tests.apps.{path.parent.name}.parsers")
        targets |= own.TARGETS
        found |= own.FOUND
    return targets, found


_BYTES = (b"\0", b"\xff", b"-", b"9", b'"', b"{", b"[", b"}", b"]", b",", b":", b"\n", b"..", b"/")
_VALUES = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**70, -(2**63), 1e308, 0.5, "", "x", "../x", "/etc/passwd",
    "\0", "\ud800", [], {}, [[]], {"": {}}, [1, "a"], "9" * 30,
)  # fmt: skip


def mutated(draw: random.Random, data: bytes) -> bytes:
    """An input a few changes away."""
    if draw.random() < 0.5 and (changed := _as_json(draw, data)) is not None:
        return changed
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        at = draw.randrange(len(found) + 1)
        match draw.randrange(8):
            case 0 if at < len(found):
                found[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(found):
                found[at] = draw.randrange(256)
            case 2:
                del found[at : at + draw.choice((1, 2, 8, 64))]
            case 3:
                found[at:at] = draw.choice(_BYTES) * draw.choice((1, 1, 2, 9))
            case 4:
                start = draw.randrange(len(found) + 1)
                found[at:at] = found[start : start + draw.choice((1, 4, 16, 64))]
            case 5:
                del found[at:]
            case 6:
                number = draw.choice((0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1))
                size = draw.choice((2, 4, 8))
                found[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
            case _:
                lines = bytes(found).split(b"\n")
                draw.shuffle(lines)
                found = bytearray(b"\n".join(lines)) if draw.random() < 0.2 else found
    if draw.random() < 0.002:
        at, what = draw.randrange(len(found) + 1), draw.choice((b"[", b"{", b'{"a":', b"("))
        found[at:at] = what * 100_000
    return bytes(found)


def _as_json(draw: random.Random, data: bytes) -> bytes | None:
    """With values of its JSON changed; None where it has none."""
    start = 8 if data[8:9] == b"{" else 0
    size = struct.unpack("<Q", data[:8])[0] if start else len(data)
    try:
        value = json.loads(data[start : start + size])
    except (ValueError, RecursionError):
        return None
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = _changed(draw, value)
    text = json.dumps(value).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :] if start else text


def _changed(draw: random.Random, value: Any) -> Any:
    """`value` with one of the values in it replaced, removed or repeated."""
    places = list(_places(value))
    if not places:
        return copy.deepcopy(draw.choice(_VALUES))
    holder, key = draw.choice(places)
    match draw.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(0, copy.deepcopy(holder[key]))
        case 1:
            holder[draw.choice(("../a", "", "x/../../y", "/a", "a\0", "new"))] = holder[key]
        case 2:
            other, name = draw.choice(places)
            holder[key] = copy.deepcopy(other[name])
        case _:
            holder[key] = copy.deepcopy(draw.choice(_VALUES))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = enumerate(value) if isinstance(value, list) else []
    pairs = value.items() if isinstance(value, dict) else pairs
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)


def failure(target: Target, folder: Path, data: bytes) -> str:
    """The failure of reading this input; empty: it is read, or refused as it should be."""
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(folder, data)
    except ValueError as error:
        if "wanted" not in str(error):
            return f"a ValueError that does not teach: {str(error)[:300]}\n{_short()}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}\n{_short()}"
    took = time.perf_counter() - began
    return f"it takes {took:.1f} seconds" if took > SLOW_SECONDS else ""


def _short() -> str:
    return "".join(traceback.format_exc().splitlines(keepends=True)[-14:])


def failures(target: Target, count: int, seed: int = 0) -> Iterator[tuple[bytes, str]]:
    """The inputs of `count` that fail, each way once."""
    draw, seen = random.Random(seed), set()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        seeds = target.seeds(folder)
        for data in seeds:
            if text := failure(target, folder, data):
                yield data, f"a valid one: {text}"
        for _ in range(count):
            data = mutated(draw, draw.choice(seeds))
            text = failure(target, folder, data)
            place = tuple(line for line in text.splitlines() if line.startswith("  File"))[-2:]
            if text and (place, text[:20]) not in seen:
                seen.add((place, text[:20]))
                yield data, text


def guided(target: Target, count: int) -> None:
    """Have atheris make the inputs, which keeps those that reach new code; raises at a failure."""
    atheris: Any = importlib.import_module("atheris")
    for found in gc.get_objects():
        if isinstance(found, FunctionType) and str(found.__module__).startswith("functron."):
            atheris.instrument_func(found)
    with tempfile.TemporaryDirectory() as made:
        folder, corpus = Path(made) / "work", Path(made) / "corpus"
        folder.mkdir()
        corpus.mkdir()
        for index, data in enumerate(target.seeds(folder)):
            (corpus / str(index)).write_bytes(data)

        def one(data: bytes) -> None:
            if text := failure(target, folder, data):
                print(data, text, sep="\n")
                raise AssertionError(text)

        options = [f"-runs={count}", f"-artifact_prefix={made}/"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], one)
        atheris.Fuzz()


def main(arguments: Sequence[str]) -> int:
    """Print the inputs that fail; the exit code is 1 if there are any."""
    words = [word for word in arguments if word != "--guided"]
    count = int(words.pop()) if words and words[-1].isdigit() else 2000
    targets, _ = find_tables()
    if "--guided" in arguments:
        guided(targets[words[0]], count)
        return 0
    bad = 0
    for name in words or targets:
        if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
            print("parquet: left out, for pyarrow is not installed")
            continue
        began = time.perf_counter()
        found = list(failures(targets[name], count))
        print(f"{name}: {len(found)} of {count} ({time.perf_counter() - began:.0f} s)", flush=True)
        for data, text in found:
            print(f"    {data[:400]!r}\n{text}")
        bad += len(found)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
