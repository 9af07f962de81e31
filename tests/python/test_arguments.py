"""An argument of attention is declared once, in python/api/arguments.py."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import pytest
from arrays import qkv

import dlattn

API = Path(__file__).resolve().parents[2] / "python" / "api"
FUNCTIONS = ("attention", "attention_varlen", "supported", "plan")


@pytest.fixture(scope="module")
def write() -> Iterator[ModuleType]:
    sys.path.insert(0, str(API))
    try:
        spec = importlib.util.spec_from_file_location("write_api", API / "write.py")
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(API))
        sys.modules.pop("arguments", None)


def test_generated_modules_are_what_the_declarations_say(write):
    for path, text in write.outputs().items():
        assert path.read_text(encoding="utf-8") == text, f"run python {API / 'write.py'}"


def test_check_notices_a_change(write, tmp_path, monkeypatch, capsys):
    stale = tmp_path / "_attention.py"
    monkeypatch.setattr(write, "PACKAGE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["write.py"])
    assert write.main() == 0
    monkeypatch.setattr(sys, "argv", ["write.py", "--check"])
    assert write.main() == 0
    stale.write_text(stale.read_text(encoding="utf-8").replace("softcap: float", "softcap: int"))
    assert write.main() == 1 and "_attention.py" in capsys.readouterr().err


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_binding_takes_the_arguments_in_the_same_order(write, name):
    """They are passed by position: an order of its own would exchange them silently."""
    natives = [name] if name.startswith("attention") else [name, f"{name}_varlen"]
    for native in natives:
        varlen = native.endswith("_varlen")
        function = "attention_varlen" if varlen else "attention"
        declared = [a.name for a in write.ARGUMENTS if function in a.functions]
        signature = getattr(dlattn._core, native).__doc__.splitlines()[0]
        assert re.findall(r"(\w+): object", signature) == declared


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_are_explicit(write, name):
    function = getattr(dlattn, name)
    parameters = inspect.signature(function).parameters
    assert list(parameters) == [a.name for a in write.ARGUMENTS if name in a.functions]
    for argument in write.ARGUMENTS:
        if name not in argument.functions:
            continue
        parameter = parameters[argument.name]
        if argument.default is None:
            assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        else:
            assert parameter.kind is parameter.KEYWORD_ONLY
            assert parameter.default == ast.literal_eval(argument.default)
    assert set(get_type_hints(function)) == {*parameters, "return"}


@pytest.mark.parametrize("name", ["attention", "attention_varlen"])
def test_every_argument_has_a_paragraph(name):
    section = inspect.getdoc(getattr(dlattn, name)).partition("\nArgs:\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^    (\w+): ", section, re.MULTILINE)
    assert documented == list(inspect.signature(getattr(dlattn, name)).parameters)


class Recorder:
    """In the place of the native module: tells what it was called with."""

    def __getattr__(self, name: str) -> Any:
        def native(*args: Any) -> Any:
            self.call = (name, args)
            return {"kernel": "cpu"} if name.startswith("plan") else (True, ())

        return native


def test_one_declaration_reaches_signature_docstring_and_calls(write, monkeypatch):
    declare = write.Argument
    arguments = (
        *write.ARGUMENTS,
        declare(
            "num_splits", "int | None", default="None", doc="Parts of the keys.", values="Any."
        ),
        declare("page_table", "Any", default="None", functions=write.VARLEN, doc="Pages."),
    )
    native = Recorder()
    made: dict[str, Any] = {}
    for stem in ("attention", "plan"):
        template = (API / f"{stem}.py.in").read_text(encoding="utf-8")
        exec(write.fill(template, arguments), made)
    made |= {"_core": native, "Support": lambda *a: a, "Plan": lambda **a: a}

    for name in FUNCTIONS:
        parameters = inspect.signature(made[name]).parameters
        assert parameters["num_splits"].default is None
        assert ("page_table" in parameters) == (name != "attention")
    assert "num_splits: Parts of the keys." in made["attention"].__doc__
    assert "num_splits: Any." in made["attention"].__doc__
    assert "page_table: Pages." in made["attention_varlen"].__doc__

    q, k, v = qkv()
    made["attention"](q, k, v, num_splits=3)
    assert native.call[0] == "attention" and native.call[1][-1] == 3
    for name in ("supported", "plan"):
        made[name](q, k, v, num_splits=3)
        assert native.call[0] == name and native.call[1][-1] == 3
        made[name](q, k, v, num_splits=3, page_table=4)
        assert native.call[0] == f"{name}_varlen" and native.call[1][-2:] == (3, 4)
    made["attention_varlen"](q, k, v, 1, 2, 3, 4, page_table=5)
    assert native.call[0] == "attention_varlen"
    assert native.call[1][3:7] == (1, 2, 3, 4) and native.call[1][-2:] == (None, 5)
