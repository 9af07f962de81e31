"""`python -m dlattn run`: attention on arrays in files."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

import dlattn
from dlattn.cli.files import Array, Place, check_outputs, load, save
from dlattn.console.devices import FLOAT8, find_device
from dlattn.console.errors import CommandError, first_line

FILES = ".npy, .npz (file.npz:key) or .safetensors (file.safetensors:name)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for name in "qkv":
        parser.add_argument(f"--{name}", required=True, metavar="FILE", help=f"{name}: {FILES}")
    parser.add_argument(
        "-o",
        "--out",
        required=True,
        metavar="FILE",
        help="where out goes. A file that is there is replaced; but one given with the name of an "
        "array (file.npz:name) keeps its other arrays",
    )
    parser.add_argument(
        "--lse", metavar="FILE", help="where the log-sum-exp goes, if wanted; likewise"
    )
    for name in "qkv":
        parser.add_argument(
            f"--{name}-descale",
            metavar="FILE",
            help=f"factors of the elements of {name}, by head, with {name} of float8_e4m3fn",
        )
    parser.add_argument(
        "--out-dtype",
        choices=("bfloat16", "float16", "float32"),
        help="dtype of out with q of float8_e4m3fn; default: bfloat16",
    )
    parser.add_argument("--bias", metavar="FILE", help="added to the scores")
    parser.add_argument("--mask", metavar="FILE", help="boolean, true where a query may attend")
    parser.add_argument(
        "--causal",
        nargs="?",
        const="bottom_right",
        choices=("bottom_right", "top_left"),
        help="attend to no later key; aligned at the end unless top_left",
    )
    parser.add_argument("--layout", choices=("bshd", "bhsd"), default="bshd", help="default: bshd")
    parser.add_argument(
        "--softmax-scale", type=float, metavar="X", help="default: 1/sqrt(head_dim)"
    )
    parser.add_argument("--softcap", type=float, default=0.0, metavar="X", help="default: none")
    parser.add_argument(
        "--window",
        nargs=2,
        type=_window_side,
        default=(None, None),
        metavar=("LEFT", "RIGHT"),
        help="keys before and after a query's own position; 'none' for no limit",
    )
    parser.add_argument("--kernel", default="auto", help="force a kernel; default: auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    inputs = _places(args, "q", "k", "v", "q_descale", "k_descale", "v_descale", "bias", "mask")
    outputs = _places(args, "out", "lse")
    check_outputs(outputs, inputs)

    loaded = {name: _load(name, place) for name, place in inputs.items()}
    device = find_device(args.device, any(x.dtype.name == FLOAT8 for x in loaded.values()))
    try:
        arrays: dict[str, Any] = {name: _moved(device.put, x) for name, x in loaded.items()}
        out, lse = dlattn.attention(
            arrays["q"],
            arrays["k"],
            arrays["v"],
            causal=args.causal or False,
            softmax_scale=args.softmax_scale,
            window=tuple(args.window),
            softcap=args.softcap,
            bias=arrays.get("bias"),
            mask=arrays.get("mask"),
            q_descale=arrays.get("q_descale"),
            k_descale=arrays.get("k_descale"),
            v_descale=arrays.get("v_descale"),
            out_dtype=args.out_dtype,
            layout=args.layout,
            kernel=args.kernel,
            return_lse=True,
        )
    except (TypeError, ValueError) as error:  # dlattn's, or a framework's on another dtype
        raise CommandError(str(error)) from error
    results = {"out": _moved(device.get, out), "lse": _moved(device.get, lse)}
    save([(place, name, results[name]) for name, place in outputs.items()])
    for name, place in outputs.items():
        array = results[name]
        print(f"{name}: {tuple(array.shape)} {np.dtype(array.dtype).name} -> {place}")
    return 0


def _places(args: argparse.Namespace, *names: str) -> dict[str, Place]:
    given = {name: getattr(args, name) for name in names}
    return {name: _place(name, text) for name, text in given.items() if text is not None}


def _place(name: str, text: str) -> Place:
    try:
        return Place.parse(text)
    except CommandError as error:
        raise CommandError(f"--{name} {error}") from None


def _load(name: str, place: Place) -> Array:
    try:
        return load(place)
    except CommandError as error:
        raise CommandError(f"--{name} {error}") from error


def _moved(move: Callable[[Any], Any], array: Any) -> Any:
    try:
        return move(array)
    except RuntimeError as error:  # each framework has its own for a GPU that has no memory left
        raise dlattn.DeviceError(first_line(error)) from error


def _window_side(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, nor 'none'") from None
