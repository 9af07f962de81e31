"""Problems of gradients computed by `dlattn.jax`; the test that imports this has JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gradients import Problem, check

import dlattn.jax as face
from dlattn.reference import ReferenceGradients

TARGET = "dlattn_attention_backward"


def lowered_gradients(problem: Problem) -> tuple[Any, tuple[Any, Any]]:
    """The program that computes the gradients, and its arguments."""
    fixed = {name: jnp.asarray(x) for name, x in problem.inputs.items() if name == "mask"}
    moving = {name: jnp.asarray(x) for name, x in problem.inputs.items() if name != "mask"}
    has_lse = problem.dlse is not None
    given = (problem.dout, problem.dlse) if has_lse else problem.dout

    def call(moving: Any) -> Any:
        return face.attention(**moving, **fixed, **problem.options, return_lse=has_lse)

    def gradients(moving: Any, given: Any) -> Any:
        return jax.vjp(call, moving)[1](given)[0]

    arguments = moving, jax.tree.map(jnp.asarray, given)
    return jax.jit(gradients).lower(*arguments), arguments


def named(found: dict[str, Any]) -> ReferenceGradients:
    names = ("q", "k", "v", "bias", "alibi_slopes", "sinks")
    return ReferenceGradients(*(np.asarray(found[n]) if n in found else None for n in names))


def check_problem(problem: Problem) -> None:
    """One custom call computes all of them, and they are right.

    Where terms cancel, nothing but the rounding of out and lse is left of a gradient: the plain
    computation must have those that the custom call has, of a GPU if there is one.
    """
    lowered, arguments = lowered_gradients(problem)
    inputs = {name: jnp.asarray(x) for name, x in problem.inputs.items()}
    forward = jax.jit(lambda given: face.attention(**given, **problem.options, return_lse=True))
    problem.out, problem.lse = map(np.asarray, forward(inputs))
    assert lowered.as_text().count(f"custom_call @{TARGET}(") == 1
    check(problem, named(lowered.compile()(*arguments)))
