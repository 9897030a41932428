"""Rows in batches of other sizes."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replicax.datasets import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY, from_arrays
from replicax.datasets.rebatch import Rebatched, rebatch, rebatched
from replicax.datasets.sources import as_source

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def batches_of(*sizes):
    ends = np.cumsum([0, *sizes])
    return [np.arange(a, b) for a, b in itertools.pairwise(ends)]


def cut(num_rows, sizes):
    """What is wanted, row by row."""
    out, start, turn = [], 0, 0
    while start < num_rows:
        size = sizes[turn % len(sizes)]
        out.append(list(range(start, min(start + size, num_rows))))
        start += size
        turn += 1
    return out


def tolist(batches):
    return [batch.tolist() for batch in batches]


SIZES = st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any)


@quick
@given(given_sizes=st.lists(st.integers(0, 6), max_size=6), sizes=SIZES)
def test_every_row_once_in_its_order(given_sizes, sizes):
    out = tolist(rebatch(batches_of(*given_sizes), sizes))
    assert out[: len(cut(sum(given_sizes), sizes))] == cut(sum(given_sizes), sizes)
    assert not any(out[len(cut(sum(given_sizes), sizes)) :])


@quick
@given(
    given_sizes=st.lists(st.integers(0, 6), max_size=6), sizes=SIZES, taken=st.data()
)
def test_a_position_is_exact_in_the_middle_of_a_given_batch(given_sizes, sizes, taken):
    source = as_source(batches_of(*given_sizes))
    first = Rebatched(source.start, sizes, None)
    for _ in range(taken.draw(st.integers(0, 8))):
        next(first, None)
    state = json.loads(json.dumps(first.get_state()))
    second = Rebatched(source.start, sizes, state)
    assert second.get_state() == state
    assert tolist(second) == tolist(first)


def test_a_size_of_zero_yields_a_batch_without_rows():
    assert tolist(rebatch(batches_of(4), [2, 0])) == [[0, 1], [], [2, 3]]


def test_given_batches_of_no_rows_are_passed_over():
    assert tolist(rebatch(batches_of(0, 3, 0, 0, 1), [2])) == [[0, 1], [2, 3]]


def test_structures_and_strings_of_other_lengths():
    given_batches = [
        {"s": np.array(["a", "b"]), "x": (np.arange(2), None)},
        {"s": np.array(["cde"]), "x": (np.arange(2, 3), None)},
    ]
    (out,) = rebatch(given_batches, [3])
    assert out["s"].tolist() == ["a", "b", "cde"]
    assert out["x"][0].tolist() == [0, 1, 2] and out["x"][1] is None


def test_a_buffer_that_is_used_again_does_not_change_earlier_rows():
    def reusing():
        buffer = np.empty(3)
        for step in range(4):
            buffer[:] = step
            yield buffer

    out = list(rebatch(reusing(), [2]))
    assert tolist(out) == [[0, 0], [0, 1], [1, 1], [2, 2], [2, 3], [3, 3]]


@quick
@given(
    given_sizes=st.lists(st.integers(0, 6), max_size=6),
    rows=st.integers(1, 5),
)
def test_what_is_known_of_a_rebatched_source(given_sizes, rows):
    source = rebatched(as_source(batches_of(*given_sizes)), rows)
    want = cut(sum(given_sizes), [rows])
    assert source.cardinality == len(want)
    assert source.sizes == {n: sum(len(b) == n for b in want) for n in map(len, want)}
    assert source.batch_size == rows
    assert tolist(source.peek()) == tolist(source.start(None)) == want


def test_rebatched_epochs_are_one_run_of_rows():
    source = as_source(from_arrays(np.arange(5)).batch(4).repeat(2))
    out = rebatched(source, 3)
    assert tolist(out.start(None)) == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4]]
    assert (out.cardinality, out.sizes) == (4, {3: 3, 1: 1})


def test_lengths_that_are_not_finite():
    endless = as_source(from_arrays(np.arange(5)).batch(4).repeat())
    assert rebatched(endless, 3).cardinality == INFINITE_CARDINALITY
    unknown = as_source(lambda: batches_of(4))
    assert rebatched(unknown, 3).cardinality == UNKNOWN_CARDINALITY
    assert rebatched(as_source(iter(batches_of(4))), 3).peek is None


def test_closing_closes_the_given_batches():
    closed = []

    def generator():
        try:
            yield from batches_of(4, 4)
        finally:
            closed.append(True)

    batches = rebatched(as_source(generator), 3).start(None)
    next(batches)
    batches.close()
    assert closed == [True]


@pytest.mark.parametrize(
    "state", [{"turn": 0}, {"turn": -1, "used": 0, "source": {"batches": 0}}]
)
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="'turn', 'used', 'source'"):
        Rebatched(as_source(batches_of(4)).start, [3], state)
