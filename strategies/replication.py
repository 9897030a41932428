"""The proof that replicas do not drift apart, made when a step is traced.

:func:`prove` decides for every output of a traced step whether it can differ between
replicas, and finds collectives and writes that are wrong wherever they lead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicax import _compat

from .blame import clause, user_line
from .variation import ASSERT_MIRRORED, Cause, Finding, ProblemKind
from .variation_rules import analyse

__all__ = ["ASSERT_MIRRORED", "Problem", "Proof", "prove"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something in a step that is wrong whatever its outputs are.

    Attributes:
      kind: ``"divergent_collective"``: only some replicas would reach a collective.
        ``"effect_under_checkpoint"``: a write that may happen twice.
        ``"ref_in_loop_predicate"``: a write that a loop's predicate would not see.
        ``"assert_mirrored"``: a value asserted to be mirrored varies.
      message: Sentences for the user, with the line of the user's program.
    """

    kind: ProblemKind
    message: str


@dataclasses.dataclass(frozen=True)
class Proof:
    """What is known about a step.

    Attributes:
      varies: For each output, whether replicas may hold different values. Where this
        is false, all replicas hold the same bits, provided that the devices' kernels
        are deterministic: that equal programs make equal results of equal operands.
      problems: What is wrong, in the order of the program.
      causes: For each output, why it varies, or None.
      input_names: What each input is called.
    """

    varies: tuple[bool, ...]
    problems: tuple[Problem, ...]
    causes: tuple[Cause | None, ...] = dataclasses.field(repr=False, compare=False)
    input_names: tuple[str, ...] = dataclasses.field(repr=False, compare=False)

    def why(self, output: int) -> str:
        """Says what makes an output vary, in the manner of "depends on ...".

        Args:
          output: The index of an output that varies.
        """
        cause = self.causes[output]
        assert cause is not None
        return clause(cause, self.input_names)


def prove(
    jaxpr: Any,
    varying_inputs: Sequence[bool],
    axis_name: str = "replica",
    input_names: Sequence[str] = (),
) -> Proof:
    """Decides which outputs of a step are equal on all replicas.

    Args:
      jaxpr: What ``jax.make_jaxpr`` returned in the body of the ``shard_map``. What it
        captured is taken to be equal on all replicas.
      varying_inputs: For each input, whether replicas may hold different values.
      axis_name: The mesh axis that replicas are counted along.
      input_names: What problems call each input, for example ``"batch['x']"``.

    Returns:
      The proof.

    Raises:
      ValueError: The number of flags is not the number of inputs.

    Example:
      >>> import jax
      >>> from replicax.strategies.replication import prove
      >>> def step(w, x):
      ...     return jax.lax.pmean(w * x, "replica"), w * x
      >>> jaxpr = jax.make_jaxpr(step, axis_env=[("replica", 2)])(1.0, 2.0)
      >>> prove(jaxpr, [False, True]).varies
      (False, True)
    """
    causes, findings = analyse(jaxpr, varying_inputs, axis_name)
    return Proof(
        varies=tuple(cause is not None for cause in causes),
        problems=tuple(
            Problem(finding.kind, _message(finding, input_names))
            for finding in findings
        ),
        causes=tuple(causes),
        input_names=tuple(input_names),
    )


def _message(finding: Finding, input_names: Sequence[str]) -> str:
    here = user_line(finding.eqn, finding.enclosing)
    if finding.kind == "assert_mirrored":
        assert finding.cause is not None
        label = _compat.checkpoint_label(finding.eqn) or ""
        path = label.removeprefix(ASSERT_MIRRORED)
        why = clause(finding.cause, input_names)
        return f"{path} would differ between replicas: it {why}."
    if finding.kind == "effect_under_checkpoint":
        return (
            f"A variable is written{here} under jax.checkpoint, which may run this "
            "twice: once in the forward and once in the backward pass. Return the "
            "value from the checkpointed function and write it outside."
        )
    if finding.kind == "ref_in_loop_predicate":
        return (
            f"The predicate of the lax.while_loop{here} uses a variable that is "
            "written inside the loop. JAX shows such a predicate the value from before "
            "the loop. Carry the value through the loop, and write the variable after "
            "it."
        )
    assert finding.divergence is not None
    divergence = finding.divergence
    around = user_line(divergence.eqn, divergence.enclosing)
    return (
        f"The collective {finding.eqn.primitive}{here} stands in a "
        f"{_CONTROL_FLOW[divergence.eqn.primitive.name]}{around} whose predicate "
        f"differs between replicas: it {clause(divergence.predicate, input_names)}. "
        "The replicas that do not reach the collective would leave the others waiting "
        "for ever. Move the collective out, or make the predicate equal with an "
        "all_reduce."
    )


_CONTROL_FLOW = {"cond": "lax.cond", "while": "lax.while_loop"}
