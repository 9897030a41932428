"""The form of a conformance case, and how an answer is compared with TF's.

Values and counts decide, not containers. TF hands out equal values of several replicas
as a wrapper with one component for each; here they are one plain array, whose copy on
every device is then compared. Of an error the kind decides, not the wording.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx


class Each(tuple):
    """What TF answered for each replica, in its PerReplica or Mirrored."""

    def __new__(cls, *components):
        return super().__new__(cls, components)


# TF's internal errors for arguments that it cannot use are of many kinds. Here they are
# a ValueError or a TypeError, whichever of the two describes the fault.
_BAD_ARGUMENT = (ValueError, TypeError)
_KINDS = {
    "AssertionError": _BAD_ARGUMENT,
    "AttributeError": _BAD_ARGUMENT,
    "IndexError": _BAD_ARGUMENT,
    "InvalidArgumentError": _BAD_ARGUMENT,
    "KeyError": KeyError,
    "NotFoundError": _BAD_ARGUMENT,
    "NotImplementedError": NotImplementedError,
    "RuntimeError": RuntimeError,
    "TypeError": _BAD_ARGUMENT,
    "ValueError": _BAD_ARGUMENT,
}


@dataclasses.dataclass(frozen=True)
class Raises:
    """An error instead of a value: TF's, by its name, or Replicax's, by its class."""

    kind: str | type[Exception]

    def accepts(self, outcome: Any) -> bool:
        kind = _KINDS[self.kind] if isinstance(self.kind, str) else self.kind
        return isinstance(outcome, kind)


@dataclasses.dataclass(frozen=True)
class Case:
    """One question that TF was asked, and what both say.

    Attributes:
      name: The name of the recorded answer.
      verdict: ``"same"``, ``"differs"`` or ``"n/a"``.
      tf: TF's recorded answer.
      answer: Asks Replicax the same question.
      ours: What Replicax shall answer, where that differs.
      reason: Why it differs, or why the question cannot be asked here.
    """

    name: str
    verdict: str
    tf: Any
    answer: Callable[[], Any] | None = None
    ours: Any = None
    reason: str = ""

    @functools.cached_property
    def outcome(self) -> Any:
        """Replicax's answer: a value, or the error that it raised."""
        try:
            return self.answer()
        except Exception as error:
            return error


def same(name: str, tf: Any, answer: Callable[[], Any]) -> Case:
    return Case(name, "same", tf, answer)


def differs(
    name: str, tf: Any, answer: Callable[[], Any], *, ours: Any, reason: str
) -> Case:
    return Case(name, "differs", tf, answer, ours, reason)


def not_applicable(name: str, tf: Any, reason: str) -> Case:
    return Case(name, "n/a", tf, reason=reason)


# -- comparing -----------------------------------------------------------------------


def matches(expected: Any, outcome: Any) -> bool:
    """Whether an answer has the values, counts and kinds that are expected."""
    if isinstance(expected, Raises):
        return expected.accepts(outcome)
    if isinstance(outcome, Exception):
        return False
    if isinstance(expected, Each):
        parts = _components(outcome)
        return len(parts) == len(expected) and all(map(matches, expected, parts))
    if isinstance(
        outcome, rx.PerReplica
    ):  # of one replica: TF hands out the bare value
        return outcome.num_replicas == 1 and matches(expected, outcome.values[0])
    if isinstance(outcome, (jax.Array, np.ndarray, np.generic)):
        return _same_array(expected, np.asarray(outcome))
    if hasattr(outcome, "_asdict"):
        outcome = {"namedtuple": outcome._asdict()}
    if isinstance(expected, dict):
        return (
            isinstance(outcome, Mapping)
            and expected.keys() == outcome.keys()
            and all(matches(v, outcome[k]) for k, v in expected.items())
        )
    if isinstance(expected, (list, tuple)):
        return (
            isinstance(outcome, (list, tuple))
            and len(expected) == len(outcome)
            and all(map(matches, expected, outcome))
        )
    return type(expected) is type(outcome) and expected == outcome


def _components(outcome: Any) -> list[Any]:
    if isinstance(outcome, rx.PerReplica):
        return list(outcome.values)
    if isinstance(outcome, jax.Array):
        return [shard.data for shard in outcome.addressable_shards]
    return [outcome]


def _same_array(expected: Any, got: np.ndarray) -> bool:
    try:
        expected = np.asarray(expected)
    except ValueError:  # a ragged list is not one array
        return False
    return (
        expected.shape == got.shape
        and (expected.dtype.kind == got.dtype.kind or expected.size == 0)
        and np.allclose(expected, got, rtol=1e-6, atol=0, equal_nan=True)
    )


def spoiled(expected: Any) -> list[Any]:
    """Returns wrong variants of an expectation: each changes one figure of it."""
    if isinstance(expected, Raises):
        is_runtime_error = expected.kind in ("RuntimeError", "NotImplementedError")
        other = KeyError if is_runtime_error else RuntimeError
        return [Raises(other), None]
    if isinstance(expected, dict):
        return [
            {**expected, k: wrong} for k, v in expected.items() for wrong in spoiled(v)
        ]
    if isinstance(expected, (list, tuple)):
        make = (lambda parts: Each(*parts)) if isinstance(expected, Each) else list
        return [
            make([*expected[:i], wrong, *expected[i + 1 :]])
            for i, v in enumerate(expected)
            for wrong in spoiled(v)
        ] + [make(expected[:-1] if expected else [0])]
    if isinstance(expected, bool):
        return [not expected]
    if isinstance(expected, float) and np.isnan(expected):
        return [0.0]
    if isinstance(expected, (int, float)):
        return [expected + 1]
    return [f"not {expected}"]


# -- asking --------------------------------------------------------------------------


@functools.cache
def mirrored(num_replicas: int) -> rx.MirroredStrategy:
    """The one strategy of so many replicas that all cases share."""
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


@functools.cache
def one_device() -> rx.OneDeviceStrategy:
    return rx.OneDeviceStrategy("cpu:1")


def placed(strategy: rx.Strategy, *components: Any) -> rx.PerReplica:
    """The components as arrays, one for each replica of ``strategy``."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: jnp.asarray(components[context.replica_id_in_sync_group])
    )


def values(*components: Any) -> rx.PerReplica:
    """The components on as many replicas of a ``MirroredStrategy``."""
    return placed(mirrored(len(components)), *components)


def tf_name(device: jax.Device) -> str:
    """What TF calls this process's device."""
    index = jax.local_devices().index(device)
    return f"/job:localhost/replica:0/task:0/device:{device.platform.upper()}:{index}"
