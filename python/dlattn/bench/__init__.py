"""`python -m dlattn bench`: this library and its peers, first checked, then timed in turns."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import dlattn
from dlattn.bench import (
    compare,
    decode,
    eight_bit,
    environment,
    features,
    load,
    plot,
    precision,
    report,
    scores,
)
from dlattn.bench.cases import Case, parse_shapes
from dlattn.bench.decode import report as decode_report
from dlattn.bench.features import Group
from dlattn.bench.report import Result
from dlattn.bench.session import Session
from dlattn.bench.timing import MEMORY_BOUND, QUICK, SUSTAINED
from dlattn.console.devices import gpu_status
from dlattn.console.errors import CommandError
from dlattn.console.text import Progress
from dlattn.console.writing import check_distinct, check_writable, is_stream, write_text

# On torch tensors, with contestants and baselines of their own.
_STUDIES = ("features", "scores", "eight_bit", "decode")
_OWN_PEERS = ("eight_bit", "decode")  # studies that choose their peers themselves
_PEERS = {  # that a set of shapes is about, on a GPU; all others take part if they are named
    "sweep": ["torch-flash", "torch-cudnn", "fa4"],
    "small": ["torch-flash", "torch-efficient"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--shape",
        default="basic",
        metavar="WHICH",
        help="basic (default), sweep, small, features, scores, eight_bit, decode or B,H,S,D",
    )
    parser.add_argument(
        "--head-dim", nargs="*", type=int, metavar="D", help="only shapes of these head_dims"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="GROUP",
        help="only these groups of features, scores, eight_bit or decode",
    )
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="causal only; default: both")
    masks.add_argument("--full", action="store_true", help="full only; default: both")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="default: float16 on a GPU, for eight_bit and decode bfloat16; float32 on the CPU",
    )
    parser.add_argument(
        "--kernels",
        nargs="*",
        metavar="K",
        help="kernels of dlattn: auto, a kernel, or a kernel and its shape such as wmma:wide; "
        "default: all, or auto for sweep, small, features, scores, eight_bit and decode, and wmma "
        "too for features on Hopper",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="P",
        help="default: all that are installed; for sweep, small, features, scores, eight_bit and "
        "decode those that these are about",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--quick", action="store_true", help="short windows: a first impression")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.png, .svg, .pdf)")
    parser.add_argument(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="measure nothing: compare what --json wrote twice",
    )
    parser.add_argument("--commit", metavar="SHA", help="to record; default: ask git, here")


def main(args: argparse.Namespace) -> int:
    """Run the command; 1 if one of our kernels is wrong."""
    if args.compare is not None:
        print(compare.text(args.compare))
        return 0
    device = args.device or ("cpu" if gpu_status() else "cuda")
    outputs = {"--json": args.json, "--plot": args.plot}
    for option, path in outputs.items():
        if path is not None:
            check_writable(path, option)
    check_distinct(outputs)
    if args.plot:
        plot.require(args.plot)
    session = _session(args, device)
    watch = load.Watch(device)
    watch.before()
    dtype = args.dtype or _default_dtype(args.shape, device)
    decoding = None
    if args.shape == "decode":
        decoding = decode.study(_context(args, session, dtype, _masks(args)))
    groups = _groups(args, session, dtype, decoding)
    checks = _checks(args, session, dtype)
    about = environment.describe(device, args.commit)
    protocol = session.protocol()
    if decoding is not None:
        protocol.update(decode.protocol(device))
    _print_head(about, session, protocol["method"], watch.reasons())

    progress = Progress(len(groups) + len(checks) + 2)
    progress.step("ceilings: matrix product, copy")
    float8 = args.shape == "eight_bit"
    ceiling = environment.ceilings(device, dtype, session.windows, float8=float8)
    results: list[Result] = []
    host: dict[str, float | None] = {}
    checked: dict[str, Any] = {}

    def save(complete: bool) -> dict[str, Any]:
        environs = {**about, "busy": watch.reasons()}
        document = report.to_json(environs, protocol, ceiling, results, host, complete)
        if decoding is not None:
            found = decode_report.summary(results, about["machine"])
            document["decode"] = {**decoding.about(), **found}
        if args.shape == "eight_bit":
            copy = ceiling["copy_gb_per_s"]
            document["eight_bit"] = {
                "summary": eight_bit.summary(results),
                "quantising": precision.quantising_rates(results, copy),
                **checked,
            }
        if args.json is not None and (complete or not is_stream(args.json)):
            write_text(args.json, json.dumps(document, indent=1, allow_nan=False) + "\n")
        return document

    for name, group in groups:
        progress.step(name)
        timed = session.time(group())
        report.mark(timed, watch.during())
        results += timed
        session.release()
        save(complete=False)  # a long run that is cut off keeps what it has measured
    for name, check in checks.items():
        progress.step(name)
        checked[name] = check()
        session.release()
        save(complete=False)
    progress.step("host time of a call")
    few = session.host_entrants(dtype) if decoding is None else decoding.host_entrants()
    host = session.host_times(few)
    watch.during()
    watch.after()
    progress.close()

    document = save(complete=True)
    if decoding is not None:
        print(decode_report.text(document, results))
    else:
        print(report.print_results(results, ceiling))
    print()
    print(report.print_host_times(host))
    if args.shape == "eight_bit":
        print(f"\n{eight_bit.text(document)}")
    if document["busy"]:
        print(f"\n{load.warning(document['busy'])}")
    if args.plot:
        plot.draw(document, args.plot)
    return 1 if any(result.ours and result.wrong for result in results) else 0


def _session(args: argparse.Namespace, device: str) -> Session:
    """With the contestants that were asked for, or those that a set of shapes is about."""
    kernels, peers = args.kernels, args.peers
    if args.shape in (*_STUDIES, *_PEERS) and kernels is None:
        kernels = ["auto"]
        if args.shape == "features" and device == "cuda" and _on_hopper():
            kernels.append("wmma")  # which auto takes beside sm90, and sm90 is measured by
    if args.shape in _STUDIES:
        if importlib.util.find_spec("torch") is None:
            raise CommandError(f"--shape {args.shape} needs torch, which holds its tensors")
        if peers is None or args.shape in _OWN_PEERS:
            peers = []  # the study knows its own
    elif device == "cuda" and peers is None:
        peers = _PEERS.get(args.shape)
    windows = MEMORY_BOUND if args.shape == "decode" else SUSTAINED
    return Session(device, QUICK if args.quick else windows, kernels, peers)


def _default_dtype(shape: str, device: str) -> str:
    """That of the 16-bit tensors; the CPU's kernels compute in float32."""
    if device == "cpu":
        return "float32"
    return "bfloat16" if shape in ("eight_bit", "decode") else "float16"


def _on_hopper() -> bool:
    return any(device.compute_capability == (9, 0) for device in dlattn.info().devices)


def _masks(args: argparse.Namespace) -> list[bool]:
    """Whether causal: those that were asked for, or both."""
    masks = [causal for causal, wanted in ((False, args.full), (True, args.causal)) if wanted]
    return masks or [False, True]


def _groups(
    args: argparse.Namespace, session: Session, dtype: str, decoding: decode.Study | None
) -> list[tuple[str, Group]]:
    """Who takes turns with whom, each with a name; tensors are made when it is their turn."""
    if decoding is not None:
        return _chosen(args, decoding.groups())
    if args.shape in _STUDIES:
        context = _context(args, session, dtype, _masks(args))
        study = {"features": features, "scores": scores, "eight_bit": eight_bit}[args.shape]
        return _chosen(args, study.groups(context))
    if args.only is not None:
        raise CommandError(f"--only is for --shape {' and '.join(_STUDIES)}")
    cases = [
        Case(sizes, causal, dtype)
        for sizes in parse_shapes(args.shape, session.device)
        if args.head_dim is None or sizes[3] in args.head_dim
        for causal in _masks(args)
    ]
    if not cases:
        raise CommandError(f"--head-dim {args.head_dim} leaves no shape of {args.shape}")
    return [(f"{case.label} {case.mask} {dtype}", partial(session.of_case, case)) for case in cases]


def _chosen(args: argparse.Namespace, named: dict[str, list[Group]]) -> list[tuple[str, Group]]:
    """The groups of a study that were asked for, each with its name."""
    for name in args.only or ():
        if name not in named:
            raise CommandError(f"--only {name}; accepted here: {', '.join(named)}")
    chosen = [
        (name, group)
        for name, members in named.items()
        if args.only is None or name in args.only
        for group in members
    ]
    if not chosen:
        raise CommandError(f"--head-dim, --only and masks leave nothing of {args.shape}")
    return chosen


def _context(
    args: argparse.Namespace, session: Session, dtype: str, masks: list[bool]
) -> features.Context:
    ours = [contestant for contestant in session.contestants if contestant.ours]
    return features.Context(session.device, dtype, ours, args.peers, masks, args.head_dim)


def _checks(
    args: argparse.Namespace, session: Session, dtype: str
) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """The findings of a study beside times, unless some of its groups are asked for alone."""
    if args.shape != "eight_bit" or args.only is not None:
        return {}
    return eight_bit.checks(_context(args, session, dtype, [False]))


def _print_head(about: dict[str, Any], session: Session, method: str, busy: list[str]) -> None:
    machine, versions, git = about["machine"], about["versions"], about["git"]
    where = machine.get("gpu") or machine["cpu"]
    commit = f"commit {git['sha'][:12]}" if git["sha"] else "unknown commit"
    commit += " with changes" if git["dirty"] else ""
    print(f"{where}; " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{commit}; {method}")
    if session.device == "cpu":
        print(f"{dlattn.info().cpu_threads} threads, load average {machine['load_average']}")
    if busy:
        print(load.warning(busy))
    print(flush=True)
