"""`python -m dlattn bench`: this library and its peers, first checked, then timed in turns."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dlattn
from dlattn.bench import (
    backward,
    compare,
    cudnn_library,
    eight_bit,
    environment,
    load,
    parts,
    plot,
    record,
    report,
    sets,
)
from dlattn.bench.decode import report as decode_report
from dlattn.bench.features import Group
from dlattn.bench.record import Record
from dlattn.bench.session import Session
from dlattn.bench.timing import MEMORY_BOUND, QUICK, SUSTAINED
from dlattn.console.devices import gpu_status
from dlattn.console.errors import CommandError
from dlattn.console.text import Progress
from dlattn.console.writing import check_distinct, check_writable, is_stream, write_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--shape",
        default="basic",
        metavar="WHICH",
        help="basic (default), sweep, small, features, scores, eight_bit, decode, backward or "
        "B,H,S,D",
    )
    parser.add_argument(
        "--head-dim", nargs="*", type=int, metavar="D", help="only shapes of these head_dims"
    )
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="GROUP",
        help="only these groups of features, scores, eight_bit, decode or backward",
    )
    parser.add_argument(
        "--passes",
        nargs="+",
        choices=backward.PASSES,
        help="what of backward to time; default: both",
    )
    masks = parser.add_mutually_exclusive_group()
    masks.add_argument("--causal", action="store_true", help="causal only; default: both")
    masks.add_argument("--full", action="store_true", help="full only; default: both")
    parser.add_argument(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="default: bfloat16 on a GPU, float32 on the CPU",
    )
    parser.add_argument(
        "--kernels",
        nargs="*",
        metavar="K",
        help="kernels of dlattn: auto, a kernel, or a kernel and its shape such as wmma:wide; "
        "default: all, or auto for sweep, small, features, scores, eight_bit, decode and backward, "
        "and wmma too for features on Hopper",
    )
    parser.add_argument(
        "--peers",
        nargs="*",
        metavar="P",
        help="default: all that are installed; for sweep, small, features, scores, eight_bit, "
        "decode and backward those that these are about",
    )
    parser.add_argument(
        "--cudnn",
        type=Path,
        metavar="FOLDER",
        help="let torch compute with the cuDNN in this folder, such as an unpacked nvidia-cudnn "
        "wheel",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument(
        "--part", metavar="K/N", help="measure the K-th of N parts of the set, about equally long"
    )
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        help="begin nothing that may not end by then; what was measured is written",
    )
    parser.add_argument(
        "--continue",
        dest="continued",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="leave out what these results of the same commit, card and set have already",
    )
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
    limit = None if args.time_limit is None else parts.seconds_of(args.time_limit)
    deadline = parts.Deadline(limit)
    part = parts.ALL if args.part is None else parts.parse_part(args.part)
    device = args.device or ("cpu" if gpu_status() else "cuda")
    _check_outputs(args)
    session = _with_cudnn(args, device)
    watch = load.Watch(device)
    watch.before()
    dtype = args.dtype or ("float32" if device == "cpu" else "bfloat16")
    chosen = sets.choose(args, session, dtype)
    steps = {name: _timing(session, watch, name, group) for name, group in chosen.groups.items()}
    steps |= {name: _checking(name, check) for name, check in chosen.checks.items()}
    protocol = {**session.protocol(), **chosen.protocol}
    found = Record(args.shape, list(steps), environment.describe(device, args.commit), protocol)
    found.decoding = chosen.decoding
    earlier = [record.read(path, "--continue") for path in args.continued or ()]
    if earlier:
        names = [*map(str, args.continued), "this run"]
        every = [*earlier, found.document([], complete=False)]
        record.require_same(dict(zip(names, every, strict=True)))
    done = {step for document in earlier for step in record.measured(document)}
    todo = [name for name in part.of(list(steps)) if name not in done]
    _print_head(found.about, session, protocol["method"], watch.reasons())
    if not todo:
        print("Nothing is left to measure.")
        return 0

    progress = Progress(len(todo) + 2)
    progress.step("ceilings: matrix product, copy")
    float8 = args.shape == "eight_bit"
    found.ceiling = environment.ceilings(device, dtype, session.windows, float8=float8)
    left = list(todo)
    while left and deadline.allows():
        progress.step(left[0])
        began = deadline.now()
        steps[left[0]](found)
        session.release()
        deadline.took(deadline.now() - began)
        left.pop(0)
        _save(args, found, watch, complete=False)  # a run that is cut off keeps what it has
    progress.step("host time of a call")
    if part.number == 1 and not left and not any(d["host_seconds"] for d in earlier):
        found.host = session.host_times(chosen.host_entrants())
    watch.during()
    watch.after()
    progress.close()

    document = _save(args, found, watch, complete=not left)
    _print_findings(args, found, document)
    if left:
        print(f"\n{parts.left_line(todo, left)}")
    if args.plot:
        plot.draw(document, args.plot)
    return 1 if any(result.ours and result.wrong for result in found.results) else 0


Step = Callable[[Record], None]


def _timing(session: Session, watch: load.Watch, name: str, group: Group) -> Step:
    """The step that times a group of entrants, whose tensors are made when it is their turn."""

    def step(found: Record) -> None:
        timed = session.time(group())
        report.mark(timed, watch.during())
        found.add(name, timed)

    return step


def _checking(name: str, check: Callable[[], list[dict[str, Any]]]) -> Step:
    """The step that finds something beside times."""

    def step(found: Record) -> None:
        found.checked[name] = check()
        found.add(name, [])

    return step


def _check_outputs(args: argparse.Namespace) -> None:
    """Raise before anything is measured that could not be written."""
    outputs = {"--json": args.json, "--plot": args.plot}
    for option, path in outputs.items():
        if path is not None:
            check_writable(path, option)
    check_distinct(outputs)
    if args.plot:
        plot.require(args.plot)


def _save(
    args: argparse.Namespace, found: Record, watch: load.Watch, complete: bool
) -> dict[str, Any]:
    document = found.document(watch.reasons(), complete)
    if args.json is not None and (complete or not is_stream(args.json)):
        write_text(args.json, json.dumps(document, indent=1, allow_nan=False) + "\n")
    return document


def _print_findings(args: argparse.Namespace, found: Record, document: dict[str, Any]) -> None:
    if found.decoding is not None:
        print(decode_report.text(document, found.results))
    else:
        print(report.print_results(found.results, found.ceiling))
    print()
    print(report.print_host_times(found.host))
    if args.shape == "eight_bit":
        print(f"\n{eight_bit.text(document)}")
    if document["busy"]:
        print(f"\n{load.warning(document['busy'])}")


def _with_cudnn(args: argparse.Namespace, device: str) -> Session:
    """The session, once torch has the cuDNN that it is to use."""
    if args.cudnn is None:
        return _session(args, device)
    if device != "cuda":
        raise CommandError(f"--cudnn {args.cudnn}: accepted on a GPU only")
    version = cudnn_library.load(args.cudnn)
    session = _session(args, device)
    cudnn_library.check(args.cudnn, version)
    return session


def _session(args: argparse.Namespace, device: str) -> Session:
    """With the contestants that were asked for, or those that a set of shapes is about."""
    kernels, peers = args.kernels, args.peers
    if args.shape in (*sets.STUDIES, *sets.PEERS) and kernels is None:
        kernels = ["auto"]
        if args.shape == "features" and device == "cuda" and _on_hopper():
            kernels.append("wmma")  # which auto takes beside sm90, and sm90 is measured by
    if args.shape in sets.STUDIES:
        if importlib.util.find_spec("torch") is None:
            raise CommandError(f"--shape {args.shape} needs torch, which holds its tensors")
        if peers is None or args.shape in sets.OWN_PEERS:
            peers = []  # the study knows its own
    elif device == "cuda" and peers is None:
        peers = sets.PEERS.get(args.shape)
    windows = MEMORY_BOUND if args.shape == "decode" else SUSTAINED
    return Session(device, QUICK if args.quick else windows, kernels, peers)


def _on_hopper() -> bool:
    return any(device.compute_capability == (9, 0) for device in dlattn.info().devices)


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
