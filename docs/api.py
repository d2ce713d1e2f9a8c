"""Make the API pages: HTML of the docstrings of all that `functron` exports, with pdoc.

    pip install -e ".[docs]" && python docs/api.py build/api

There is a page for `functron`, and one for every module in ``functron.__all__``, with the names
that it exports in turn. Whatever pdoc warns of is an error: an annotation that cannot be resolved,
or a name that does not exist.
"""

import argparse
import dataclasses
import inspect
import sys
import typing
import warnings
from pathlib import Path
from types import ModuleType

import pdoc

import functron


def exported() -> dict[str, ModuleType]:
    """The modules that `functron` exports, by their public names."""
    values = {name: getattr(functron, name) for name in functron.__all__}
    return {f"functron.{n}": value for n, value in values.items() if inspect.ismodule(value)}


def prepare(module: ModuleType) -> None:
    """Make what is exported lazily, or annotated in strings, as pdoc expects to find it."""
    for name in getattr(module, "__all__", ()) or tuple(vars(module)):
        value = vars(module).setdefault(name, getattr(module, name))
        if not inspect.isclass(value):
            continue
        if issubclass(value, tuple) and hasattr(value, "_fields"):
            # the annotations of a NamedTuple's __new__ have forgotten their module
            value.__new__.__annotations__ = typing.get_type_hints(value)
        elif dataclasses.is_dataclass(value) and any(
            map(dataclasses.is_dataclass, value.__bases__)
        ):
            # inherited fields are annotated with names of their own module
            value.__init__.__annotations__ |= typing.get_type_hints(value)
            if value.__name__ == value.__bases__[0].__name__:
                # sections of applications are in no source: their defaults stand for them
                for each in value.__annotations__.keys() - vars(value).keys():
                    setattr(value, each, getattr(value(), each))


def contents(modules: dict[str, ModuleType]) -> str:
    """A table of the modules' pages, in Markdown."""
    rows = ["", "", "| module | |", "|---|---|"]
    for name, module in modules.items():
        page = f"./{module.__name__.replace('.', '/')}.html"
        first = (module.__doc__ or "").partition("\n")[0]
        rows.append(f"| [`{name}`]({page}) | {first} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the API pages.")
    parser.add_argument("folder", type=Path, help="where to write them, such as build/api")
    folder = parser.parse_args().folder
    modules = exported()
    functron.__doc__ = (functron.__doc__ or "") + contents(modules)
    pdoc.render.configure(docformat="google", footer_text=f"functron {functron.__version__}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pages = {}
        for module in (functron, *modules.values()):
            prepare(module)
            pages[module.__name__] = pdoc.doc.Module(module)
        for name, page in pages.items():
            path = folder / f"{name.replace('.', '/')}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pdoc.render.html_module(page, pages), encoding="utf-8")
        (folder / "index.html").write_text(pdoc.render.html_index(pages), encoding="utf-8")
        (folder / "search.js").write_text(pdoc.render.search_index(pages), encoding="utf-8")
    for warning in caught:
        print(warning.message, file=sys.stderr)
    if caught:
        sys.exit(f"{len(caught)} warnings: the pages in {folder} are not complete")
    print(f"{len(pages)} pages in {folder}")


if __name__ == "__main__":
    main()
