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

import numpy
import pytest
from arrays import qkv
from numpy.testing import assert_array_equal

import dlattn

API = Path(__file__).resolve().parents[3] / "python" / "api"
# The functions whose keywords the binding takes as a dict.
BY_OPTIONS = ("attention", "attention_varlen")
FUNCTIONS = ("attention", "attention_varlen", "attention_with_kvcache", "supported", "plan")


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
    (tmp_path / "integrations" / "torch").mkdir(parents=True)
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
    forms = [""] if name.startswith("attention") else ["", "_varlen", "_with_kvcache"]
    for form in forms:
        native = name + form
        function = name if name.startswith("attention") else f"attention{form}"
        declared = [a.name for a in write.ARGUMENTS if function in a.functions and a.native]
        if native in BY_OPTIONS:
            declared = [
                a.name for a in write.ARGUMENTS if name in a.functions and a.default is None
            ]
        signature = getattr(dlattn._core, native).__doc__.splitlines()[0]
        assert re.findall(r"(\w+): object", signature) == declared
        assert ("options: dict" in signature) == (native in BY_OPTIONS)


@pytest.mark.parametrize("name", BY_OPTIONS)
def test_every_keyword_reaches_the_binding(write, name):
    """By its name and no other: a value that no argument accepts is refused as its own."""
    q, k, v = qkv()
    arrays, packed = [q, k, v], []
    if name == "attention_varlen":
        arrays = [x[0] for x in arrays]
        longest = [len(x) for x in arrays[:2]]
        packed = [*(numpy.array([0, n], numpy.int32) for n in longest), *longest]
    call = getattr(dlattn, name)
    declared = [a for a in write.ARGUMENTS if name in a.functions and a.default is not None]
    assert len(declared) > 15
    for argument in declared:
        with pytest.raises((TypeError, dlattn.UnsupportedError), match=rf"\b{argument.name}\b"):
            call(*arrays, *packed, **{argument.name: object()})
        # A name that Python has not interned is another object.
        text = "".join([argument.name[:2], argument.name[2:]])
        given = ast.literal_eval(argument.default)
        assert_array_equal(call(*arrays, *packed, **{text: given}), call(*arrays, *packed))


class Text(str):
    """A name of its own class."""


@pytest.mark.parametrize("name", BY_OPTIONS)
def test_wrong_calls_raise_as_pythons_own(name):
    call = getattr(dlattn, name)
    required = [x for x in inspect.signature(call).parameters.values() if x.default is x.empty]
    values = range(len(required))
    for wrong in ("tau", "max_seqlen", "Causal", "seqused_q", ""):
        expected = f"{name}() got an unexpected keyword argument '{wrong}'"
        with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
            call(*values, **{wrong: None})
    with pytest.raises(TypeError, match=rf"{name}\(\) missing 1 required .*'{required[-1].name}'"):
        call(*values[:-1])
    with pytest.raises(
        TypeError, match=rf"{name}\(\) takes {len(values)} positional arguments but"
    ):
        call(*values, True)
    with pytest.raises(TypeError, match=rf"{name}\(\) got multiple values for argument 'k'"):
        call(*values, k=None)


def test_names_and_tensors_may_come_in_any_form():
    q, k, v = qkv()
    expected = dlattn.attention(q, k, v, causal=True, window=(3, None))
    assert_array_equal(dlattn.attention(v=v, q=q, k=k, window=(3, None), causal=True), expected)
    named = {Text("causal"): True, Text("window"): (3, None)}
    assert_array_equal(dlattn.attention(q, k, v, **named), expected)


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
            required = name in argument.required_by
            default = inspect.Parameter.empty if required else ast.literal_eval(argument.default)
            assert parameter.default == default
    assert set(get_type_hints(function)) == {*parameters, "return"}


@pytest.mark.parametrize("name", FUNCTIONS[:3])
def test_every_argument_has_a_paragraph(name):
    section = inspect.getdoc(getattr(dlattn, name)).partition("\nArgs:\n")[2].partition("\n\n")[0]
    documented = re.findall(r"^    (\w+): ", section, re.MULTILINE)
    assert documented == list(inspect.signature(getattr(dlattn, name)).parameters)


OPERANDS = dlattn._core.operands
STRUCTS = {
    "forward": "DlattnAttention",
    "backward": "DlattnBackward",
    "append": "DlattnAppend",
    "merge": "DlattnMerge",
    "quantize": "DlattnQuantize",
}


@pytest.mark.parametrize("operation", STRUCTS)
def test_the_tables_have_the_tensors_of_the_c_structs(operation):
    header = API.parents[1] / "src" / "include" / "dlattn" / "c.h"
    text = re.sub(r"//[^\n]*", "", header.read_text(encoding="utf-8"))
    body = re.search(rf"typedef struct {{([^}}]*)}} {STRUCTS[operation]};", text)
    assert body
    fields = re.findall(r"(?:DlattnTensor\*?|(?:void|int32_t)\*) (\w+);", body[1])
    names = {name for name, *_ in OPERANDS[operation]}
    if operation == "backward":  # whose struct has the call of forward
        names -= {name for name, *_ in OPERANDS["forward"]}
    assert len(fields) > 3 and sorted(fields) == sorted(names)


def test_gradients_have_the_dimensions_of_their_inputs():
    """But for the rows of lse, which lie side by side, and those of its gradient anywhere."""
    dims = {name: text for name, text, _ in OPERANDS["backward"]}
    dims["lse"] = dims["lse"].replace(" ", "")
    gradients = [name for name in dims if name.startswith("d")]
    assert len(gradients) == 8 and all(dims[name] == dims[name[1:]] for name in gradients)


@pytest.mark.parametrize("name", FUNCTIONS[:3])
def test_functions_take_the_optional_tensors_of_the_table_in_its_order(write, name):
    tensors = [operand for operand, _, takers in OPERANDS["forward"] if name in takers]
    parameters = inspect.signature(getattr(dlattn, name)).parameters
    assert len(tensors) >= 3 and tensors == [x for x in parameters if x in tensors]
    assert all(parameters[x].default is None for x in tensors)


def test_append_kv_takes_the_tensors_of_its_table():
    tensors = {name for name, *_ in OPERANDS["append"]} - {"q_out"}
    assert tensors <= set(inspect.signature(dlattn.append_kv).parameters)


def test_jax_and_torch_take_the_tensors_of_the_table():
    forward = OPERANDS["forward"]
    torch = pytest.importorskip("torch")
    pytest.importorskip("dlattn.torch")
    schema = torch.ops.dlattn.attention.default._schema.arguments
    assert [name for name, _, takers in forward if "torch" in takers] == [
        argument.name for argument in schema[3:] if "Tensor" in str(argument.type)
    ]
    pytest.importorskip("jax")
    from dlattn.integrations.jax import _operands

    optional = [name for name, _, takers in forward if "attention" in takers]
    assert ("q", "k", "v", *optional, "seqused_k") == _operands.NAMES


class Recorder:
    """In the place of the native module: tells what it was called with."""

    def __getattr__(self, name: str) -> Any:
        def native(*args: Any) -> Any:
            self.call = (name, args)
            return {"kernel": "cpu"} if name.startswith("plan") else (True, ())

        return native


def test_one_declaration_reaches_signature_docstring_and_calls(write, monkeypatch):
    declare = write.Argument
    varlen, kvcache = ((f"attention_{x}", "supported", "plan") for x in ("varlen", "with_kvcache"))
    arguments = (
        *write.ARGUMENTS,
        declare("num_slices: int | None = None", "Parts of the keys.", values="Any."),
        declare("tree: Any = None", "Of drafts.", functions=varlen),
        declare("depth: Any = None", "Of the cache.", functions=kvcache),
    )
    native = Recorder()
    made: dict[str, Any] = {}
    for stem in ("attention", "plan"):
        template = (API / f"{stem}.py.in").read_text(encoding="utf-8")
        exec(write.fill(template, arguments), made)
    made |= {"_core": native, "Support": lambda *a: a, "Plan": lambda **a: a}

    for name in FUNCTIONS:
        parameters = inspect.signature(made[name]).parameters
        assert parameters["num_slices"].default is None
        assert ("tree" in parameters) == (name in varlen)
        assert ("depth" in parameters) == (name in kvcache)
    assert "num_slices: Parts of the keys." in made["attention"].__doc__
    assert "num_slices: Any." in made["attention"].__doc__
    assert "tree: Of drafts." in made["attention_varlen"].__doc__
    assert "depth: Of the cache." in made["attention_with_kvcache"].__doc__

    q, k, v = qkv()
    made["attention"](q, k, v, num_slices=3)
    assert native.call == ("attention", (q, k, v, {"num_slices": 3}))
    for name in ("supported", "plan"):
        made[name](q, k, v, num_slices=3)
        assert native.call[0] == name and native.call[1][-1] == 3
        made[name](q, k, v, num_slices=3, tree=4)
        assert native.call[0] == f"{name}_varlen" and native.call[1][-2:] == (3, 4)
        made[name](q, k, v, num_slices=3, depth=4)
        assert native.call[0] == f"{name}_with_kvcache" and native.call[1][-2:] == (3, 4)
        assert all(x is y for x, y in zip(native.call[1], (q, k, v), strict=False))
    made["attention_varlen"](q, k, v, 1, 2, 3, 4, tree=5)
    assert native.call == ("attention_varlen", (q, k, v, 1, 2, 3, 4, {"tree": 5}))
    made["attention_with_kvcache"](q, k, v, seqused_k=6, depth=7)
    assert native.call[0] == "attention_with_kvcache"
    assert native.call[1][3] == 6 and native.call[1][-2:] == (None, 7)


@pytest.mark.parametrize("name", ["supported", "plan"])
def test_the_arguments_tell_which_function_is_asked_about(name, monkeypatch):
    native = Recorder()
    monkeypatch.setattr("dlattn._plan._core", native)
    monkeypatch.setattr("dlattn._plan.Plan", dict)
    ask = getattr(dlattn, name)
    for argument in ("seqused_k", "page_table", "cache_batch_idx", "leftpad_k", "max_seqlen_k"):
        ask(1, 2, 3, **{argument: 4})
        assert native.call[0] == f"{name}_with_kvcache" and 4 in native.call[1][3:8]
        if argument in ("seqused_k", "page_table", "max_seqlen_k"):
            ask(1, 2, 3, max_seqlen_q=5, **{argument: 4})
            assert native.call[0] == f"{name}_varlen" and {4, 5} <= {*native.call[1][3:9]}
    for argument in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q"):
        ask(1, 2, 3, **{argument: 4})
        assert native.call[0] == f"{name}_varlen" and 4 in native.call[1][3:6]
    ask(1, 2, 3)
    assert native.call[0] == name


def wrong_question(name: str, **arguments: Any) -> str:
    q, k, v = qkv()
    if name == "plan":
        with pytest.raises(dlattn.UnsupportedError) as raised:
            dlattn.plan(q, k, v, **arguments)
        return str(raised.value)
    support = dlattn.supported(q, k, v, **arguments)
    assert not support.ok and len(support.reasons) == 1
    return support.reasons[0]


@pytest.mark.parametrize("name", ["supported", "plan"])
def test_what_the_function_does_not_take_is_refused(name):
    for argument in ("bias", "q_descale", "precision", "out_dtype"):
        assert wrong_question(name, seqused_k=1, **{argument: 2}) == (
            f"{argument} is given; accepted: None, as attention_with_kvcache does not take it"
        )
    for argument in ("cache_batch_idx", "leftpad_k"):
        assert wrong_question(name, cu_seqlens_q=1, **{argument: 2}) == (
            f"{argument} is given; accepted: None, as attention_varlen does not take it"
        )
