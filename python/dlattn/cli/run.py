"""`python -m dlattn run`: attention on arrays in files."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import dlattn
from dlattn.cli.devices import find_device
from dlattn.cli.errors import CommandError
from dlattn.cli.files import Place, check_writable, load, same_file, save

FILES = ".npy, .npz (file.npz:key) or .safetensors (file.safetensors:name)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for name in "qkv":
        parser.add_argument(f"--{name}", required=True, metavar="FILE", help=f"{name}: {FILES}")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="where out goes")
    parser.add_argument("--lse", metavar="FILE", help="where the log-sum-exp goes, if wanted")
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
    inputs = _places(args, "q", "k", "v", "bias", "mask")
    outputs = _places(args, "out", "lse")
    _refuse_overlaps(inputs, outputs)
    for place in outputs.values():
        check_writable(place)

    device = find_device(args.device)
    arrays: dict[str, Any] = {name: device.put(load(place)) for name, place in inputs.items()}
    try:
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
            layout=args.layout,
            kernel=args.kernel,
            return_lse=True,
        )
    except TypeError as error:  # the file holds what is no tensor of numbers to dlattn
        raise CommandError(str(error)) from error
    results = {"out": device.get(out), "lse": device.get(lse)}
    save([(place, name, results[name]) for name, place in outputs.items()])
    for name, place in outputs.items():
        array = results[name]
        print(f"{name}: {tuple(array.shape)} {np.dtype(array.dtype).name} -> {place}")
    return 0


def _places(args: argparse.Namespace, *names: str) -> dict[str, Place]:
    given = {name: getattr(args, name) for name in names}
    return {name: Place.parse(text) for name, text in given.items() if text}


def _refuse_overlaps(inputs: dict[str, Place], outputs: dict[str, Place]) -> None:
    for name, output in outputs.items():
        for source, place in inputs.items():
            if same_file(output.path, place.path):
                raise CommandError(
                    f"--{name} {output}: that is the file of --{source}; give it another name"
                )
    if len(outputs) == 2 and same_file(outputs["out"].path, outputs["lse"].path):
        keys = {place.key or name for name, place in outputs.items()}
        if outputs["out"].path.suffix == ".npy" or len(keys) == 1:
            raise CommandError(f"--lse {outputs['lse']}: --out goes there too")


def _window_side(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens, nor 'none'") from None
