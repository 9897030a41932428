"""Where calls may stand: scopes, steps, and neither; per thread."""

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

TWO = rx.MirroredStrategy(["cpu:0", "cpu:1"])
OTHER = rx.MirroredStrategy(["cpu:1", "cpu:2"])


def where():
    return (
        rx.has_strategy(),
        rx.in_cross_replica_context(),
        rx.get_replica_context() is None,
        rx.get_strategy(),
    )


def test_the_three_contexts():
    default = rx.get_strategy()
    assert where() == (False, False, False, default)
    with TWO.scope() as s:
        assert s is TWO
        assert where() == (True, True, True, TWO)
    seen = []
    TWO.run(lambda: seen.append(where()))
    assert seen == [(True, False, False, TWO)]
    TWO.run(lambda: rx.get_replica_context().merge_call(lambda s: seen.append(where())))
    assert seen[1] == (True, True, True, TWO)
    assert where() == (False, False, False, default)


def test_the_default_context_acts_as_one_replica():
    ctx = rx.get_replica_context()
    assert (ctx.replica_id_in_sync_group, ctx.num_replicas_in_sync) == (0, 1)
    assert float(ctx.all_reduce("sum", 3.0)) == 3.0
    assert ctx.all_gather(jnp.ones(2)).tolist() == [1, 1]
    assert ctx.merge_call(lambda s, x: x + 1, (3,)) == 4


def test_a_scope_may_be_entered_again():
    with TWO.scope(), TWO.scope():
        assert rx.get_strategy() is TWO
    assert not rx.has_strategy()


def test_another_strategys_scope_or_calls_are_refused():
    with TWO.scope():
        with pytest.raises(rx.ContextError, match="must not be mixed"), OTHER.scope():
            pass
        with pytest.raises(rx.ContextError, match="must not be mixed"):
            OTHER.run(lambda: 0)
        with pytest.raises(rx.ContextError, match="must not be mixed"):
            OTHER.reduce("sum", 1.0)
    assert not rx.has_strategy()


def test_the_default_strategys_scope_is_refused_inside_another():
    default = rx.get_strategy()
    with default.scope():
        assert not rx.has_strategy()
    with TWO.scope(), pytest.raises(rx.ContextError, match="nested"), default.scope():
        pass


CROSS_REPLICA_CALLS = {
    "run": lambda: TWO.run(lambda: 0),
    "reduce": lambda: TWO.reduce("sum", 1.0),
    "gather": lambda: TWO.gather(jnp.ones(1)),
    "scope()": lambda: TWO.scope().__enter__(),
    "reduce_to": lambda: TWO.extended.reduce_to("sum", 1.0, "cpu:0"),
    "experimental_distribute_dataset": lambda: TWO.experimental_distribute_dataset([]),
    "experimental_distribute_values_from_function": (
        lambda: TWO.experimental_distribute_values_from_function(lambda c: 0)
    ),
}


@pytest.mark.parametrize("name", CROSS_REPLICA_CALLS)
def test_cross_replica_calls_in_a_step_are_refused_by_name(name):
    with pytest.raises(rx.ContextError, match=f"`{name.replace('()', '..')}`.*step"):
        TWO.run(CROSS_REPLICA_CALLS[name])
    assert not rx.has_strategy()


REPLICA_CALLS = {
    "all_reduce": lambda c: c.all_reduce("sum", 1.0),
    "all_gather": lambda c: c.all_gather(jnp.ones(1)),
    "reduce_scatter": lambda c: c.reduce_scatter("sum", jnp.ones(2)),
    "merge_call": lambda c: c.merge_call(lambda s: 0),
    "replica_id_in_sync_group": lambda c: c.replica_id_in_sync_group,
}


@pytest.mark.parametrize("name", REPLICA_CALLS)
@pytest.mark.parametrize("place", ["outside", "scope", "another step"])
def test_a_saved_replica_context_is_refused_elsewhere(name, place):
    saved = []
    TWO.run(lambda: saved.append(rx.get_replica_context()))

    def call():
        REPLICA_CALLS[name](saved[0])

    with pytest.raises(rx.ContextError, match=f"`{name}`"):
        if place == "outside":
            call()
        elif place == "scope":
            with TWO.scope():
                call()
        else:
            TWO.run(call)
    assert not rx.has_strategy()


def test_an_exception_leaves_the_scope():
    with pytest.raises(KeyError), TWO.scope():
        raise KeyError("x")
    assert not rx.has_strategy()


def test_set_strategy():
    rx.experimental_set_strategy(TWO)
    assert where() == (True, True, True, TWO)
    assert float(TWO.run(lambda: rx.get_replica_context().all_reduce("sum", 1.0))) == 2
    rx.experimental_set_strategy(OTHER)
    assert rx.get_strategy() is OTHER
    rx.experimental_set_strategy(None)
    assert not rx.has_strategy()
    with TWO.scope(), pytest.raises(rx.ContextError, match="inside a strategy's scope"):
        rx.experimental_set_strategy(OTHER)


def test_contexts_belong_to_their_thread():
    seen = []
    with TWO.scope():
        thread = threading.Thread(target=lambda: seen.append(rx.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_a_context_made_by_hand_acts_as_its_replica():
    with rx.ReplicaContext(TWO, 1) as bound:
        assert bound is None
        ctx = rx.get_replica_context()
        assert ctx.replica_id_in_sync_group == 1
        assert rx.get_strategy() is TWO and not rx.in_cross_replica_context()
        with pytest.raises(rx.ContextError, match="made by hand"):
            ctx.all_reduce("sum", 1.0)
    with pytest.raises(ValueError, match="must be an int"):
        rx.ReplicaContext(TWO, "one")


def test_run_in_a_merge_function_of_a_context_made_by_hand():
    with rx.ReplicaContext(TWO, 1):
        out = rx.get_replica_context().merge_call(
            lambda strategy: strategy.run(
                lambda: rx.get_replica_context().all_reduce("sum", 1.0)
            )
        )
    assert float(out) == 2.0


def test_a_strategy_is_deep_copied_but_not_copied():
    with pytest.raises(RuntimeError, match=r"copy\.deepcopy"):
        copy.copy(TWO)
    again = copy.deepcopy(TWO)
    assert again is not TWO and type(again) is type(TWO)
    assert again.mesh == TWO.mesh
    assert float(again.reduce("sum", rx.PerReplica([1.0, 2.0]))) == 3.0


def test_the_replica_context_knows_its_strategy_and_devices():
    seen = []

    def step():
        ctx = rx.get_replica_context()
        seen.append((ctx.strategy, ctx.devices, ctx.num_replicas_in_sync))
        return ctx.replica_id_in_sync_group

    out = TWO.run(step)
    assert seen == [(TWO, tuple(jax.devices()[:2]), 2)]
    assert out.dtype == np.int32
    assert [int(v) for v in out.values] == [0, 1]


@pytest.mark.parametrize(
    "error",
    [
        rx.ContextError,
        rx.DeviceError,
        rx.DivergentCollectiveError,
        rx.PerReplicaError,
        rx.ReplicaDivergenceError,
        rx.StaticArgumentError,
        rx.UnevenBatchError,
    ],
)
def test_errors_pickle_and_derive_from_the_tree(error):
    again = pickle.loads(pickle.dumps(error("what happened")))
    assert type(again) is error and str(again) == "what happened"
    assert issubclass(error, rx.ReplicaxError)
    assert issubclass(error, (ValueError, TypeError, RuntimeError))


def test_one_replica_refuses_the_values_of_several():
    values = rx.PerReplica([1.0, 2.0])
    with pytest.raises(rx.PerReplicaError):
        rx.get_replica_context().all_reduce("sum", values)
    with pytest.raises(rx.PerReplicaError, match="default strategy, of one replica"):
        rx.get_strategy().reduce("sum", values)
