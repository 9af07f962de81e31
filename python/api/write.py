"""Write Python's functions of attention from their templates and the declared arguments.

And what type checkers read: _attention.pyi and _functions.pyi, by which the result has q's type,
and _kernel_names.pyi, the names of kernels. The interpreter loads none of them.

python python/api/write.py           # write them
python python/api/write.py --check   # exit 1 if they are not what would be written

In a template, a line `@<what> <function>@` stands for lines made by `_FORMS` or `_TEXTS`.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import stubs
from arguments import ALL, ARGUMENTS, BACKWARD, TORCH, TORCH_KVCACHE, Argument

API = Path(__file__).resolve().parent
PACKAGE = API.parent / "dlattn"
_HEAD = "# Written by python/api/write.py from {}: edit that, or arguments.py.\n"
_WIDTH = 100


def outputs() -> dict[Path, str]:
    """The generated files with what they should contain."""
    written = {
        PACKAGE / template.relative_to(API).with_name(f"_{template.stem}"): (
            _HEAD.format(template.name) + fill(template.read_text(encoding="utf-8"))
        )
        for template in sorted(API.rglob("*.py.in"))
    }
    for name in stubs.MODULES:
        stub = stubs.overloads(name, written[PACKAGE / name])
        written[(PACKAGE / name).with_suffix(".pyi")] = _HEAD.format("stubs.py") + stub
    written[PACKAGE / "_kernel_names.pyi"] = stubs.KERNELS_HEAD + stubs.kernel_names(API.parents[1])
    return written


def fill(template: str, arguments: Iterable[Argument] = ARGUMENTS) -> str:
    """The template with each of its `@...@` lines replaced by the lines it stands for."""
    arguments = tuple(arguments)

    def lines(found: re.Match[str]) -> str:
        indent, what, function = found.groups()
        taken = [a for a in arguments if function in a.functions]
        return "\n".join(indent + line for line in _lines(what, taken, function, len(indent)))

    return re.sub(r"^( *)@(\w+) (\w+)@$", lines, template, flags=re.MULTILINE)


def _lines(what: str, arguments: list[Argument], function: str, indent: int) -> Iterator[str]:
    if what in _TEXTS:
        return _TEXTS[what](arguments, function, indent)
    is_meant, form = _FORMS[what]
    return (form.format(a.name) for a in arguments if is_meant(a, function))


def _signature(arguments: list[Argument], function: str, indent: int) -> Iterator[str]:
    """One parameter a line; the required arguments, or what stands for them, by position too."""
    question = re.fullmatch(r"(?:supported|plan)(_backward)?", function)
    for argument in (a for a in arguments if a.default is None):
        kind = argument.type
        if function in BACKWARD and argument.native:  # gradients are of tensors alone
            kind = kind.partition(" | ")[0]
        if question and f"attention{question[1] or ''}" not in argument.functions:
            kind = f"{kind.removesuffix(' | None')} | None = None"
        yield f"{argument.name}: {kind},"
    yield "*,"
    yield from _keywords_only(arguments, function, indent)


def _args(arguments: list[Argument], function: str, indent: int) -> Iterator[str]:
    for argument in arguments:
        docs = {
            "attention_varlen": argument.varlen_doc,
            "attention_with_kvcache": argument.kvcache_doc or argument.varlen_doc,
        }
        doc = docs.get(function) or argument.doc
        if function != "attention":
            doc = re.sub(r"\s\[\d\]", "", doc)
        yield from _paragraph(argument.name, doc, indent)


def _values(arguments: list[Argument], function: str, indent: int) -> Iterator[str]:
    for argument in arguments:
        if argument.values:
            yield from _paragraph(argument.name, argument.values, indent)


def _keywords_only(arguments: list[Argument], function: str, indent: int) -> Iterator[str]:
    """The parameters that are passed by keyword."""
    for argument in arguments:
        if function in argument.required_by:
            yield f"{argument.name}: {argument.type.removesuffix(' | None')},"
        elif argument.default is not None:
            yield f"{argument.declaration},"


def _operands(arguments: list[Argument], function: str, indent: int) -> Iterator[str]:
    """In the order of torch's operators, whose settings stand behind all tensors."""
    for argument in sorted(arguments, key=lambda a: a.default is not None and not a.is_tensor):
        if argument.name != "return_lse":  # an operator always has both results
            yield f"{_OF_OPERATORS.get(argument.name, argument.name)},"


def _named_operands(arguments: list[Argument], function: str, indent: int) -> Iterator[str]:
    """By the names in the operator's schema; the template has looked at lengths."""
    for argument in arguments:
        name = argument.name
        if name == "window":
            yield from ("window_left=sides[0],", "window_right=sides[1],")
        elif name != "return_lse":
            value = name if name.startswith("max_") else _OF_OPERATORS.get(name, name)
            yield f"{_NAMES_IN_SCHEMAS.get(name, name)}={value},"


_NAMES_IN_SCHEMAS = {"softmax_scale": "scale", "layout": "bhsd"}
# Torch's schemas have no types for these; operators take numbers.
_OF_OPERATORS = {
    "max_seqlen_q": 'arguments.length(max_seqlen_q, "max_seqlen_q")',
    "max_seqlen_k": 'arguments.length(max_seqlen_k, "max_seqlen_k")',
    "causal": "arguments.CAUSAL[causal]",
    "window": "*sides",
    "layout": 'layout == "bhsd"',
}


def _paragraph(name: str, text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        f"{name}: {' '.join(text.split())}",
        _WIDTH - indent,
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _is_required(argument: Argument, function: str) -> bool:
    return argument.default is None or function in argument.required_by


# Texts of one line for each argument that is meant, in the order in which they are declared, which
# is that of the native module too.
_FORMS: dict[str, tuple[Callable[[Argument, str], bool], str]] = {
    "names": (lambda a, _: a.native, "{},"),
    "quoted": (lambda a, _: a.native, '"{}",'),
    "entries": (lambda a, _: a.native, '"{0}": {0},'),
    "options": (lambda a, _: a.native and a.default is not None, '"{0}": {0},'),
    "tensors": (lambda a, _: a.is_tensor, "{},"),
    "required_tensors": (lambda a, f: a.is_tensor and _is_required(a, f), '"{0}": {0},'),
    "optional_tensors": (lambda a, f: a.is_tensor and not _is_required(a, f), "{0}={0},"),
}
_TEXTS = {
    "signature": _signature,
    "args": _args,
    "values": _values,
    "keywords_only": _keywords_only,
    "operands": _operands,
    "named_operands": _named_operands,
}


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    check = parser.parse_args().check
    known = {*ALL, *BACKWARD, *TORCH, *TORCH_KVCACHE}
    unknown = {name for argument in ARGUMENTS for name in argument.functions if name not in known}
    if unknown:
        raise SystemExit(f"arguments.py names functions that there are not: {sorted(unknown)}")
    stale = False
    for path, text in outputs().items():
        if check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                print(f"{path.name} is not what arguments.py and its template say", file=sys.stderr)
                stale = True
        else:
            path.write_text(text, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
