"""The sets of problems that `--shape` names: their groups, checks and peers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dlattn.bench import backward, decode, eight_bit, features, scores
from dlattn.bench.cases import Case, parse_shapes
from dlattn.bench.features import Context, Group
from dlattn.bench.session import Entrant, Session
from dlattn.console.errors import CommandError

# On torch tensors, with contestants and baselines of their own.
STUDIES = ("features", "scores", "eight_bit", "decode", "backward")
OWN_PEERS = ("eight_bit", "decode", "backward")  # studies that choose their peers themselves
PEERS = {  # that a set of shapes is about, on a GPU; all others take part if they are named
    "sweep": ["torch-flash", "torch-cudnn", "fa3", "fa4"],
    "small": ["torch-flash", "torch-cudnn", "torch-efficient", "fa3", "fa4"],
}

Check = Callable[[], list[dict[str, Any]]]


@dataclass
class Chosen:
    """The steps of a set that a run may take, and what goes with them."""

    groups: dict[str, Group]  # who takes turns with whom; tensors are made when it is their turn
    host_entrants: Callable[[], Mapping[str, Entrant]]
    checks: dict[str, Check] = field(default_factory=dict)  # findings beside times
    protocol: Mapping[str, Any] = field(default_factory=dict)  # where it is not the session's
    decoding: dict[str, Any] | None = None  # facts by which a run of decoding is read


def choose(args: argparse.Namespace, session: Session, dtype: str) -> Chosen:
    """The groups that the options leave of a set, and what goes with them."""
    masks = [causal for causal, wanted in ((False, args.full), (True, args.causal)) if wanted]
    masks = masks or [False, True]
    ours = [contestant for contestant in session.contestants if contestant.ours]
    context = Context(session.device, dtype, ours, args.peers, masks, args.head_dim)
    forward = partial(session.host_entrants, dtype)
    if args.passes is not None and args.shape != "backward":
        raise CommandError("--passes is for --shape backward")
    if args.shape == "decode":
        decoding = decode.study(context)
        groups = _chosen(args, decoding.groups())
        about = decoding.about()  # the groups say what is left out
        protocol = decode.protocol(session.device)
        return Chosen(groups, decoding.host_entrants, protocol=protocol, decoding=about)
    if args.shape == "backward":
        study = backward.study(context, args.passes)
        told = {} if args.passes is None else {"passes": list(study.passes)}
        return Chosen(_chosen(args, study.groups()), study.host_entrants, protocol=told)
    if args.shape == "eight_bit":
        checks: dict[str, Check] = {}
        if args.only is None:
            full = Context(session.device, dtype, ours, args.peers, [False], args.head_dim)
            checks = eight_bit.checks(full)
        return Chosen(_chosen(args, eight_bit.groups(context)), forward, checks)
    if args.shape in STUDIES:
        named = {"features": features, "scores": scores}[args.shape].groups(context)
        return Chosen(_chosen(args, named), forward)
    if args.only is not None:
        raise CommandError(f"--only is for --shape {' and '.join(STUDIES)}")
    cases = [
        Case(sizes, causal, dtype)
        for sizes in parse_shapes(args.shape, session.device)
        if args.head_dim is None or sizes[3] in args.head_dim
        for causal in masks
    ]
    if not cases:
        raise CommandError(f"--head-dim {args.head_dim} leaves no shape of {args.shape}")
    names = [f"{case.label} {case.kind} {dtype}" for case in cases]
    groups = {name: partial(session.of_case, case) for name, case in zip(names, cases, strict=True)}
    return Chosen(groups, forward)


def _chosen(args: argparse.Namespace, named: Mapping[str, Sequence[Group]]) -> dict[str, Group]:
    """The groups of a study that were asked for, numbered where several share a name."""
    for name in args.only or ():
        if name not in named:
            raise CommandError(f"--only {name}; accepted here: {', '.join(named)}")
    chosen = {
        f"{name} {number}" if len(members) > 1 else name: group
        for name, members in named.items()
        if args.only is None or name in args.only
        for number, group in enumerate(members, 1)
    }
    if not chosen:
        raise CommandError(f"--head-dim, --only and masks leave nothing of {args.shape}")
    return chosen
