"""Replicax answers as TensorFlow does, or says why not.

``tests/golden`` holds what TF answered when it was asked, and asks Replicax the same.
Where a record of TF tells the figures but not the function that made them, a function
with these figures is used.

Not in the table yet, because what they ask about is not there yet: checkpoints
(``ckpt_*``), many workers and their clusters (``mw_*`` but for datasets, ``mwms_*``,
``tfconfig_*``, ...), and parameter servers (``ps_*``, ``cc_*``, ``sv_*``, ...).

TF divides batches unevenly where Replicax raises, pads or drops, and lets the copies of
a variable drift apart where Replicax refuses the write. So fewer of the answers about
datasets and variables are the same than of those about running steps.
"""

import collections

import jax.numpy as jnp
import pytest

import replicax as rx

from .golden import (
    communication,
    datasets,
    devices,
    inputs,
    losses,
    reductions,
    scatters,
    sharding,
    steps,
    updates,
    variables,
)
from .golden.table import Each, Raises, matches, mirrored, spoiled, values

RUNNING = [
    *reductions.CASES,
    *steps.CASES,
    *devices.CASES,
    *losses.CASES,
    *communication.CASES,
]
# How often TF was asked, by the first words of the names: about variables,
RECORDED_VARIABLES = {
    "assign_in_update": 1,
    "central_storage": 6,
    "colocate": 2,
    "create": 17,
    "onread": 29,
    "onwrite": 29,
    "optimizer_like": 1,
    "read_var": 1,
    "reduce_of_mirrored_variable": 2,
    "scatter": 20,
    "update": 5,
    "value_container": 1,
    "var": 4,
    "variable_created": 1,
}
# and about datasets.
RECORDED_DATASETS = {
    "batch_sizes_for_worker": 8,
    "compute_batch_size": 11,
    "distribute_options": 1,
    "ds": 52,
    "dsfn": 9,
    "input_context": 3,
    "input_options": 1,
    "it": 5,
    "mw_ds": 5,
    "mw_dsfn": 2,
    "mw_element": 2,
    "optional": 1,
    "pipe": 12,
    "policy": 1,
    "rebatch": 2,
    "shard": 13,
}
VARIABLES = [*variables.CASES, *scatters.CASES, *updates.CASES]
DATASETS = [*datasets.CASES, *inputs.CASES, *sharding.CASES]
CASES = [*RUNNING, *VARIABLES, *DATASETS]


def cases(*verdicts):
    return pytest.mark.parametrize(
        "case", [pytest.param(c, id=c.name) for c in CASES if c.verdict in verdicts]
    )


@cases("same")
def test_the_answer_is_tensorflows(case):
    assert matches(case.tf, case.outcome), (case.tf, case.outcome)


@cases("differs")
def test_the_answer_differs_from_tensorflows_as_told(case):
    assert matches(case.ours, case.outcome), (case.ours, case.outcome)
    assert not matches(case.tf, case.outcome), "It does not differ any more."


@cases("same", "differs")
def test_another_answer_would_be_noticed(case):
    expected = case.tf if case.verdict == "same" else case.ours
    wrong = spoiled(expected)
    assert wrong
    for variant in wrong:
        assert not matches(variant, case.outcome), variant


def verdicts(cases):
    return collections.Counter(case.verdict for case in cases)


def test_nine_tenths_of_the_answers_about_running_are_the_same():
    counts = verdicts(RUNNING)
    applicable = counts["same"] + counts["differs"]
    assert applicable >= 80
    assert counts["same"] >= 0.9 * applicable, counts
    assert counts.keys() <= {"same", "differs", "n/a"}


@pytest.mark.parametrize(
    ("cases", "recorded"),
    [(VARIABLES, RECORDED_VARIABLES), (DATASETS, RECORDED_DATASETS)],
    ids=["variables", "datasets"],
)
def test_every_answer_is_in_the_table(cases, recorded):
    groups = sorted(recorded, key=len, reverse=True)
    counts = collections.Counter(
        next(group for group in groups if case.name.startswith(group)) for case in cases
    )
    assert counts == recorded


def test_what_becomes_of_the_answers_about_variables():
    assert verdicts(VARIABLES) == {"same": 96, "differs": 18, "n/a": 5}


def test_what_becomes_of_the_answers_about_datasets():
    assert verdicts(DATASETS) == {"same": 78, "differs": 34, "n/a": 16}


def test_no_answer_is_listed_twice():
    assert len({case.name for case in CASES}) == len(CASES)


@cases("differs", "n/a")
def test_every_exception_has_a_reason(case):
    assert len(case.reason.split()) >= 5
    assert case.reason.endswith(".")


# -- the comparison itself -----------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        pytest.param(1.0, lambda: jnp.float32(2.0), id="value"),
        pytest.param(1.0, lambda: jnp.int32(1), id="an integer for a float"),
        pytest.param(1, lambda: True, id="a bool for an int"),
        pytest.param([1.0], lambda: jnp.ones(2), id="length"),
        pytest.param(1.0, lambda: jnp.ones(1), id="rank"),
        pytest.param(1.0, lambda: values(1.0, 1.0), id="two replicas for one value"),
        pytest.param(Each(1.0, 1.0), lambda: values(1.0, 2.0), id="second replica"),
        pytest.param(Each(1.0, 1.0), lambda: jnp.float32(1.0), id="number of copies"),
        pytest.param(
            Each(1.0, 1.0),
            lambda: mirrored(4).run(lambda: jnp.float32(1.0)),
            id="number of replicas",
        ),
        pytest.param({"a": 1}, lambda: {"b": 1}, id="key"),
        pytest.param({"a": 1}, lambda: {"a": 1, "b": 2}, id="additional key"),
        pytest.param(Raises("RuntimeError"), lambda: ValueError(), id="kind of error"),
        pytest.param(Raises("ValueError"), lambda: 1.0, id="value for an error"),
        pytest.param(None, lambda: ValueError(), id="error for a value"),
    ],
)
def test_the_comparison_sees_a_wrong(expected, answer):
    assert not matches(expected, answer())


def test_the_comparison_reads_every_copy_of_a_mirrored_value():
    assert matches(Each(1.0, 1.0), mirrored(2).run(lambda: jnp.float32(1.0)))
    unequal = rx.PerReplica([1.0, 2.0])
    assert matches(Each(1.0, 2.0), unequal)
    assert not matches(Each(2.0, 1.0), unequal)
