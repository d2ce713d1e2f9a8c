"""Kernels compile, for three architectures and without a GPU, and what is compiled is kept safely."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import sysconfig
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from functron.cli import build
from functron.ops import nvrtc

pytestmark = pytest.mark.skipif(
    nvrtc.missing() is not None, reason=f"kernels cannot be compiled here: {nvrtc.missing()}"
)

KERNEL = """// doubles
// build: ELEMENT = float, double
#include "twice.cuh"
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(64) twice_(ELEMENT* x, long long n) {
    const long long i = blockIdx.x * 64ll + threadIdx.x;
    if (i < n) x[i] = twice(x[i]);
}
"""
HEADER = "template <class X> __device__ inline X twice(X x) { return 2 * x; }\n"
FLOAT = {"ELEMENT": "float"}
_ENTRY = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(__launch_bounds__\(.+?\)\s*)?(\w+)\s*\(')


FULL = pytest.mark.full
DISASSEMBLER = Path(sysconfig.get_path("platlib")) / "nvidia/cu13/bin/nvdisasm"
ROTATED = [nvrtc.ARCHS[turn:] + nvrtc.ARCHS[:turn] for turn in range(3)]


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture
def own(tmp_path) -> Path:
    """A folder of sources."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "twice.cu").write_text(KERNEL)
    (folder / "twice.cuh").write_text(HEADER)
    return folder


@pytest.fixture
def forgetful():
    """Lets what is looked for once be looked for again, in the test and after it."""
    kept = (
        nvrtc.library_path,
        nvrtc._library,
        nvrtc.include_folder,
        nvrtc.version,
        nvrtc.supported,
    )

    def forget():
        for one in kept:
            one.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.parametrize("turn", [None, *(pytest.param(i, marks=FULL) for i in range(3))])
@pytest.mark.parametrize("name", nvrtc.names())
def test_every_variant_compiles_and_keeps_to_registers(name, turn, cache):
    """By turns: some variants for one architecture each, and all for all of them with ``--full``."""
    source = nvrtc.read(name)
    number = nvrtc.names().index(name)
    variants = source.variants if turn is not None else _some(source, number)
    first = number % len(ROTATED) if turn is None else turn
    done = [
        build.Built(source, defines, arch, nvrtc.cubin(source, defines, arch, cache))
        for defines, arch in zip(variants, itertools.cycle(ROTATED[first]), strict=False)
    ]
    assert len(done) == len(variants)
    entries = [(bool(bounds), entry) for bounds, entry in _ENTRY.findall(source.text)]
    assert entries
    assert all(bounds for bounds, _ in entries), "without __launch_bounds__ a block may not fit"
    for built in done:
        what = f"{name} ({nvrtc.label(built.defines)}) for {built.arch}"
        assert not built.local, f"{what} uses local memory: {built.local}"
        assert built.compiled is not None
        assert not built.compiled.warnings, f"{what}: {built.compiled.warnings}"
        assert built.compiled.cubin[:4] == b"\x7fELF"
        used = {one.kernel for one in built.compiled.resources}
        assert used == {entry for _, entry in entries}
        assert all(0 < one.registers <= 255 for one in built.compiled.resources)


# kernels of integers, of scores of few experts, and of columns: a lane has one of them
NO_PACKS = re.compile(
    "check_ids|finish|scan_counts|count_chunks|place_rows|route|route_backward|.*_scale_gradient"
)
# packs that a thread asks for before it computes with the first, where the kernel is made for several
IN_FLIGHT = {
    "adamw": 4, "adamw_stochastic": 4, "cross_entropy_forward": 2, "cross_entropy_backward": 2,
    "glu_forward": 2, "glu_backward": 3, "rms_norm_forward": 2, "layer_norm_forward": 2,
}  # fmt: skip


@pytest.mark.skipif(not DISASSEMBLER.is_file(), reason="nvidia-cuda-nvdisasm is not installed")
@pytest.mark.parametrize("name", nvrtc.names())
def test_packs_are_moved_as_a_whole(name, cache):
    """No 16 bytes that are stored together are stored word by word, which is four times the work.

    And they are loaded so, several of a thread on their way at a time.
    """
    source = nvrtc.read(name)
    for defines in _some(source, nvrtc.names().index(name)):
        file = cache / "one.cubin"
        file.write_bytes(nvrtc.cubin(source, defines, "sm_90a", cache).cubin)
        command = [DISASSEMBLER, "-c", file]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "STG" in done.stdout
        assert _split_stores(done.stdout) == {}
        loads = _loads_in_flight(done.stdout)
        assert set(loads) == {entry for _, entry in _ENTRY.findall(source.text)}
        for kernel, most in loads.items():
            if NO_PACKS.fullmatch(kernel):
                continue
            assert most >= IN_FLIGHT.get(kernel, 1), (kernel, most)


_NO_MORE = re.compile(r"^\s*\.(L_|text)|\b(BRA|EXIT|BAR|MUFU|STG)\b")


def _loads_in_flight(text: str) -> dict[str, int]:
    """By kernel, how many packs are loaded in a row, at most: before a jump, a store, a root."""
    found: dict[str, int] = {}
    kernel, now = "", 0
    for line in text.splitlines():
        if (start := re.match(r"\s*\.text\.(\w+):", line)) is not None:
            kernel = start[1]
            found[kernel] = 0
        now = 0 if _NO_MORE.search(line) else now + ("LDG.E.128" in line)
        if kernel:
            found[kernel] = max(found[kernel], now)
    return found


def test_split_stores_are_found():
    text = """
.text.kernel:
    STG.E desc[UR4][R2.64], R9 ;
    STG.E desc[UR4][R2.64+0x8], R9 ;
    IADD3 R4, R4, 0x1, RZ ;
    STG.E desc[UR4][R2.64+0xc], R9 ;
    STG.E desc[UR4][R2.64+0x4], R9 ;
    STG.E.128 desc[UR4][R2.64+0x10], R8 ;
    BRA `(.L_x_1) ;
    @P0 STG.E desc[UR4][R2.64], R9 ;
    @P1 STG.E desc[UR4][R2.64+0x4], R9 ;
    @P2 STG.E desc[UR4][R2.64+0x8], R9 ;
    @P3 STG.E desc[UR4][R2.64+0xc], R9 ;
"""
    assert _split_stores(text) == {"kernel": 1}
    load, root = "    LDG.E.128 R4, desc[UR4][R2.64] ;\n", "    MUFU.RSQ R4, R4 ;\n"
    assert _loads_in_flight(text) == {"kernel": 0}
    assert _loads_in_flight(text + load + root + load + load) == {"kernel": 2}


_STORE = re.compile(r"(@!?U?P\d+)?\s*STG\.E\S* .*\[(R\d+)(?:\.64)?(?:\+(-?0x[0-9a-f]+))?\]")


def _split_stores(text: str) -> dict[str, int]:
    """By kernel, how often four words in a row are stored one by one, under one condition."""
    found: Counter[str] = Counter()
    kernel, at = "", defaultdict(set)
    for line in text.splitlines():
        if (start := re.match(r"\s*\.text\.(\w+):", line)) is not None:
            kernel = start[1]
        if re.match(r"\s*\.(L_|text)", line) or re.search(r"\b(BRA|EXIT|BAR)\b", line):
            at.clear()  # what follows may run without what came before
        store = _STORE.search(line)
        if store is None or re.search(r"STG\.E\.(64|128|U8|U16)", line):
            continue
        word, here = int(store[3] or "0", 16), at[store[1], store[2]]
        here.add(word)
        starts = range(word - 12, word + 1, 4)
        found[kernel] += sum({s, s + 4, s + 8, s + 12} <= here for s in starts)
    return {kernel: count for kernel, count in found.items() if count}


def _some(source: nvrtc.KernelSource, number: int) -> tuple[nvrtc.Defines, ...]:
    """Two variants that have no value of a macro in common: the last and, by turns, another."""
    last = source.variants[-1]
    others = [one for one in source.variants if all(one[macro] != last[macro] for macro in last)]
    return (others[number % len(others)], last) if last else (last,)


def test_the_readme_names_every_source_and_kernel():
    readme = (nvrtc.FOLDER / "README.md").read_text()
    for name in nvrtc.names():
        assert f"| `{name}.cu` |" in readme
        for _, entry in _ENTRY.findall(nvrtc.read(name).text):
            assert f"| {name} | {entry} |" in readme


def test_variants_are_the_product_of_the_build_lines(own):
    (own / "many.cu").write_text("// build: A = 1, 2\n//build: B=x,y , z\n// build a house = 1\n")
    many = nvrtc.read("many", own)
    assert many.macros == {"A": ("1", "2"), "B": ("x", "y", "z")}
    assert [(one["A"], one["B"]) for one in many.variants] == [
        ("1", "x"), ("1", "y"), ("1", "z"), ("2", "x"), ("2", "y"), ("2", "z"),
    ]  # fmt: skip
    (own / "one.cu").write_text("")
    assert nvrtc.read("one", own).variants == ({},)


def test_resources_are_those_that_ptxas_says(own):
    (own / "spilling.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) spilling(float* x, long long n) {\n'
        "    float kept[64];\n"
        "    __shared__ float shared[100];\n"
        "    for (int i = 0; i < 64; ++i) kept[i] = x[i * n];\n"
        "    shared[threadIdx.x % 100] = kept[n % 64];\n"
        "    __syncthreads();\n"
        "    for (int i = 0; i < 64; ++i) x[i] = kept[63 - i] * shared[i];\n"
        "}\n"
        'extern "C" __global__ void __launch_bounds__(32) idle() {}\n'
    )
    (built,) = build.build([nvrtc.read("spilling", own)], ["sm_90a"], own)
    assert built.compiled is not None
    idle, spilling = built.compiled.resources
    assert (idle.kernel, idle.stack, idle.spills, idle.shared) == ("idle", 0, 0, 0)
    # the array, which is indexed with what only the caller knows, is 64 floats; so is the stack
    assert (spilling.stack >= 256, spilling.shared) == (True, 400)
    assert spilling.registers <= 32  # 65536 of them, for two blocks of 1024
    assert built.local == (spilling,)


def test_the_command_prints_a_table_and_fails_where_local_memory_is_used(own, monkeypatch, capsys):
    read = nvrtc.read
    monkeypatch.setattr(nvrtc, "names", lambda: ("twice",))
    monkeypatch.setattr(nvrtc, "read", lambda name: read(name, own))
    arguments = ["--cache", str(own), "--arch", "sm_90a", "--jobs", "1", "--resources"]
    assert build.run(arguments) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == list(build._HEADS)
    assert lines[2].split() == list(build._SUMMARY)
    assert lines[3].split()[:4] == ["twice", "sm_90a", "2", "2"]
    assert lines[-1].startswith("2 of 2 compiled in ")
    assert str(own) in lines[-1]
    assert [line.split()[:4] for line in lines[:2]] == [
        ["twice", "ELEMENT=float", "sm_90a", "twice_"],
        ["twice", "ELEMENT=double", "sm_90a", "twice_"],
    ]
    (own / "bad.cu").write_text("int x = ;\n")
    assert build.run([*arguments, "--source", "bad"]) == 1
    assert "bad.cu(1): error" in capsys.readouterr().err
    local = "x[0] = y[n];"
    array = "long long y[9]; for (long long i = 0; i < 9; ++i) y[i] = x[i] * n;"
    kernel = f'extern "C" __global__ void local(long long* x, long long n) {{ {array} {local} }}'
    (own / "local.cu").write_text(kernel)
    assert build.run([*arguments, "--source", "local"]) == 1
    assert "local uses local memory: 72 bytes of stack" in capsys.readouterr().err


class TestMistakes:
    def test_an_unknown_source_names_the_nearest(self, own):
        with pytest.raises(ValueError, match=r"got 'twce'.*did you mean 'twice'"):
            nvrtc.read("twce", own)
        with pytest.raises(ValueError, match="install functron again"):
            nvrtc.read("twice", own / "nowhere")

    def test_a_missing_header_is_named_with_its_line(self, own):
        (own / "twice.cuh").write_text('\n#include "thrice.cuh"\n')
        with pytest.raises(ValueError, match=r'twice\.cuh, line 2: got #include "thrice\.cuh"'):
            nvrtc.read("twice", own)

    def test_a_source_that_does_not_compile_names_file_and_line(self, own):
        (own / "twice.cu").write_text(KERNEL.replace("if (i < n)", "if (j < n)"))
        with pytest.raises(
            nvrtc.CompileError, match=r"(?s)twice \(ELEMENT=float\) for sm_90a.*"
        ) as e:
            nvrtc.compile_source(nvrtc.read("twice", own), FLOAT, "sm_90a")
        assert f'{own / "twice.cu"}(7): error: identifier "j" is undefined' in str(e.value)
        (own / "twice.cu").write_text(KERNEL)
        (own / "twice.cuh").write_text("\n\n" + HEADER.replace("2 * x", "two * x"))
        with pytest.raises(nvrtc.CompileError, match=r'twice\.cuh\(3\): error: identifier "two"'):
            nvrtc.compile_source(nvrtc.read("twice", own), FLOAT, "sm_90a")

    @pytest.mark.parametrize(
        ("arch", "message"),
        [
            ("sm_75", r"got sm_75; wanted sm_80 \(A100\) or newer; .*reference"),
            (
                "sm_990a",
                r"got sm_990a, which NVRTC .* does not know; wanted one of sm_80, .*reference",
            ),
            ("hopper", r"got 'hopper'; wanted a name such as sm_80, sm_90a, sm_100a"),
        ],
    )
    def test_an_architecture_without_kernels_is_refused(self, own, arch, message):
        with pytest.raises(ValueError, match=message):
            nvrtc.cubin(nvrtc.read("twice", own), FLOAT, arch, own)

    @pytest.mark.parametrize(
        ("defines", "message"),
        [
            ({}, r"got \[\]; wanted \['ELEMENT'\]"),
            ({"ELEMENT": "int"}, "got ELEMENT=int; wanted one of float, double"),
            ({"ELEMENT": "float", "X": "1"}, r"got \['ELEMENT', 'X'\]; wanted \['ELEMENT'\]"),
        ],
    )
    def test_macros_that_are_not_declared_are_refused(self, own, defines, message):
        with pytest.raises(ValueError, match=message):
            nvrtc.cubin(nvrtc.read("twice", own), defines, "sm_90a", own)

    @pytest.mark.parametrize("package", ["cuda.bindings", "cuda.pathfinder"])
    def test_without_cuda_bindings_the_extra_is_named(self, own, forgetful, monkeypatch, package):
        find = nvrtc._found
        monkeypatch.setattr(nvrtc, "_found", lambda name: name != package and find(name))
        message = r"without cuda-bindings; .*pip install 'functron\[kernels\]'.*reference"
        assert re.search(message, nvrtc.missing() or "")
        with pytest.raises(ValueError, match=message):
            nvrtc.compile_source(nvrtc.read("twice", own), FLOAT, "sm_90a")
        with pytest.raises(ValueError, match=message):
            list(build.build([nvrtc.read("twice", own)], folder=own))

    def test_without_libnvrtc_the_extra_is_named(self, forgetful, monkeypatch):
        from cuda import pathfinder

        def none(name):
            raise RuntimeError(name)

        monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", none)
        message = r"got no libnvrtc \(RuntimeError\); .*pip install 'functron\[kernels\]'"
        assert re.search(message, nvrtc.missing() or "")

    def test_without_headers_the_extra_is_named(self, forgetful, tmp_path, monkeypatch):
        from cuda import pathfinder

        monkeypatch.setattr(nvrtc, "library_path", lambda: tmp_path / "lib" / "libnvrtc.so")
        monkeypatch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
        message = r"headers: got none in .*cuda_bf16\.h.*pip install 'functron\[kernels\]'"
        assert re.search(message, nvrtc.missing() or "")


class TestCache:
    def test_what_is_compiled_is_read_back(self, own, tmp_path, monkeypatch):
        source, folder = nvrtc.read("twice", own), tmp_path / "a" / "cache"
        first = nvrtc.cubin(source, FLOAT, "sm_90a", folder)
        assert first == nvrtc.compile_source(source, FLOAT, "sm_90a")
        (file,) = folder.glob(f"*{nvrtc.SUFFIX}")
        assert file.name.startswith("twice-sm_90a-")
        monkeypatch.setattr(nvrtc, "compile_source", None)
        assert nvrtc.cubin(source, FLOAT, "sm_90a", folder) == first

    @pytest.mark.parametrize("where", [0, 80, 300, -1, "cut", "empty", "text"])
    def test_a_damaged_file_is_compiled_again(self, own, tmp_path, where):
        source = nvrtc.read("twice", own)
        first = nvrtc.cubin(source, FLOAT, "sm_90a", tmp_path / "cache")
        (file,) = (tmp_path / "cache").glob(f"*{nvrtc.SUFFIX}")
        good = file.read_bytes()
        if isinstance(where, int):
            bad = bytearray(good)
            bad[where] ^= 1
        else:
            bad = {"cut": good[:-100], "empty": b"", "text": b"not\na cubin"}[where]
        file.write_bytes(bytes(bad))
        assert nvrtc.cubin(source, FLOAT, "sm_90a", tmp_path / "cache") == first
        assert file.read_bytes() == good

    def test_the_key_has_all_that_decides(self, own, monkeypatch):
        source = nvrtc.read("twice", own)
        keys = {nvrtc.key(source, FLOAT, "sm_90a")}
        keys.add(nvrtc.key(source, {"ELEMENT": "double"}, "sm_90a"))
        keys.add(nvrtc.key(source, FLOAT, "sm_100a"))
        (own / "twice.cuh").write_text(HEADER + "\n")
        keys.add(nvrtc.key(nvrtc.read("twice", own), FLOAT, "sm_90a"))
        (own / "twice.cuh").write_text(HEADER)
        assert nvrtc.key(nvrtc.read("twice", own), FLOAT, "sm_90a") in keys
        (own / "twice.cu").write_text(KERNEL + "\n")
        keys.add(nvrtc.key(nvrtc.read("twice", own), FLOAT, "sm_90a"))
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, "OPTIONS", ("--std=c++20",))
            keys.add(nvrtc.key(source, FLOAT, "sm_90a"))
        with monkeypatch.context() as patch:
            patch.setattr(nvrtc, "release", lambda: "14.0")
            keys.add(nvrtc.key(source, FLOAT, "sm_90a"))
        assert len(keys) == 7

    def test_the_key_has_the_contents_of_cuda_headers(self, tmp_path):
        for release in "ab":
            folder = tmp_path / release
            (folder / "crt").mkdir(parents=True)
            (folder / "cuda_fp16.h").write_text('#include "crt/host.h"\n#include <missing.h>\n')
            (folder / "crt" / "host.h").write_text("#include <cuda_fp16.h>\n")
            (folder / "other.h").write_text(release)
        a, b = (nvrtc.digest_of_headers(tmp_path / r, ("cuda_fp16.h",)) for r in "ab")
        assert a == b  # the other header is not included
        (tmp_path / "b" / "crt" / "host.h").write_text("// another release\n")
        nvrtc.digest_of_headers.cache_clear()
        assert nvrtc.digest_of_headers(tmp_path / "b", ("cuda_fp16.h",)) != a

    def test_a_folder_that_cannot_be_written_costs_only_time(self, own, monkeypatch):
        source = nvrtc.read("twice", own)
        nowhere = own / "twice.cu" / "cache"
        assert nvrtc.cubin(source, FLOAT, "sm_90a", nowhere).cubin[:4] == b"\x7fELF"

        def homeless():
            raise RuntimeError("no home")

        monkeypatch.setattr(Path, "home", homeless)
        assert nvrtc.default_folder() is None
        assert nvrtc.cubin(source, FLOAT, "sm_90a").cubin[:4] == b"\x7fELF"

    def test_threads_that_compile_the_same_agree(self, own, tmp_path):
        source = nvrtc.read("twice", own)
        with ThreadPoolExecutor(4) as pool:
            args = [(source, FLOAT, "sm_90a", tmp_path / "cache")] * 8
            found = list(pool.map(lambda each: nvrtc.cubin(*each), args))
        assert all(one == found[0] for one in found)
        assert len(list((tmp_path / "cache").glob(f"*{nvrtc.SUFFIX}"))) == 1

    def test_processes_that_compile_the_same_agree(self, own, tmp_path):
        source, folder = nvrtc.read("twice", own), tmp_path / "cache"
        program = (
            "import sys; from pathlib import Path; from functron.ops import nvrtc\n"
            f"source = nvrtc.read('twice', Path({str(own)!r}))\n"
            "print('ready', flush=True); sys.stdin.readline()\n"
            "for arch in ('sm_80', 'sm_90a'):\n"
            f"    made = nvrtc.cubin(source, {FLOAT}, arch, Path({str(folder)!r}))\n"
            "    print(made.cubin.hex())\n"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        other = subprocess.Popen([sys.executable, "-c", program], **pipes)
        assert other.stdout.readline() == "ready\n"
        other.stdin.write("\n")
        other.stdin.flush()
        mine = [nvrtc.cubin(source, FLOAT, arch, folder) for arch in ("sm_80", "sm_90a")]
        theirs, _ = other.communicate(timeout=60)
        assert other.returncode == 0
        assert theirs.split() == [one.cubin.hex() for one in mine]
        names = sorted(path.name for path in folder.glob(f"*{nvrtc.SUFFIX}"))
        assert [name.rsplit("-", 1)[0] for name in names] == ["twice-sm_80", "twice-sm_90a"]
        again = [nvrtc.cubin(source, FLOAT, arch, folder) for arch in ("sm_80", "sm_90a")]
        assert again == mine
