"""The variables of a program: an interrupt at any place leaves them whole."""

import itertools
import sys

import jax
import pytest
from replicax.strategies.variables import captured

import replicax as rx

MEAN = rx.VariableAggregation.MEAN


def interrupted_at(place, run):
    """Runs, with a Ctrl-C before one of the instructions around a launch.

    Args:
      place: The number of the instruction.
      run: What to run.

    Returns:
      Whether there are so many instructions.
    """
    instructions = itertools.count()

    def trace(frame, event, arg):
        del arg
        if frame.f_code.co_filename != captured.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and next(instructions) == place:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize(
    "strategy",
    [
        rx.OneDeviceStrategy("cpu:0"),
        rx.CentralStorageStrategy(["cpu:1"], "cpu:1"),
        rx.CentralStorageStrategy(["cpu:1"], "cpu:2"),
    ],
    ids=["direct", "central", "central, elsewhere"],
)
def test_a_ctrl_c_leaves_variables_as_before_a_step_or_after_it(strategy):
    with strategy.scope():
        v = rx.Variable([0.0], aggregation=MEAN)
        w = rx.Variable([0.0], aggregation=MEAN)

    def step():
        v.assign_add([1.0])
        w.assign_add([1.0])

    strategy.run(step)
    strategy.run(step)
    done = 2.0
    places = 0
    while interrupted_at(places, lambda: strategy.run(step)):
        assert not any(x.array.is_deleted() for x in (v, w))
        assert v.numpy() == w.numpy()
        assert v.numpy() in (done, done + 1)
        done = float(v[0])
        places += 1
    assert places > 20
    assert done > 2.0
    assert float(v[0]) == done + 1
    assert all(isinstance(x.array, jax.Array) for x in (v, w))


def test_what_was_read_is_not_consumed_by_a_later_step():
    with rx.OneDeviceStrategy("cpu:0").scope() as strategy:
        v = rx.Variable([0.0])

    def step():
        v.assign_add([1.0])

    held = []
    for _ in range(4):
        strategy.run(step)
        held.append(v.read_value())
    assert [float(x[0]) for x in held] == [1.0, 2.0, 3.0, 4.0]
