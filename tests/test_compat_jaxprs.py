"""The symbols for jaxprs that ``_compat`` stands on, on this version of JAX."""

import os

import flax
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive

import replicax
from replicax import _compat


def traced(fn, *args):
    return jax.make_jaxpr(fn, axis_env=[("replica", 2)])(*args)


def only_eqn(fn, *args):
    (eqn,) = _compat.open_jaxpr(traced(fn, *args)).eqns
    return eqn


def all_eqns(jaxpr):
    for eqn in _compat.open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in _compat.sub_jaxprs(eqn.params):
            yield from all_eqns(inner)


def test_open_jaxpr():
    closed = traced(lambda x: x + 1, 1.0)
    jaxpr = _compat.open_jaxpr(closed)
    assert len(jaxpr.eqns) == len(jaxpr.invars) == len(jaxpr.outvars) == 1
    assert _compat.open_jaxpr(jaxpr) is jaxpr
    assert _compat.is_jaxpr(closed)
    assert _compat.is_jaxpr(jaxpr)
    assert not _compat.is_jaxpr(jnp.ones(2))


def test_sub_jaxprs():
    def step(x):
        return lax.cond(x > 0, lambda: x, lambda: -x)

    cond = _compat.open_jaxpr(traced(step, 1.0)).eqns[-1]
    assert cond.primitive.name == "cond"
    assert _compat.sub_jaxprs(cond.params) == [
        _compat.open_jaxpr(branch) for branch in cond.params["branches"]
    ]
    assert _compat.sub_jaxprs(only_eqn(jnp.sin, 1.0).params) == []


def test_scan_counts():
    def loop(c, k, xs):
        def body(carry, x):
            a, b = carry
            return (a * c + k, b + x), a

        return lax.scan(body, (c, k), xs)

    scan = only_eqn(loop, 1.0, 2.0, jnp.ones(3))
    assert scan.primitive.name == "scan"
    assert _compat.scan_counts(scan.params) == (2, 2)


def test_is_ref():
    jaxpr = _compat.open_jaxpr(traced(lambda x: jax.new_ref(x)[...], 1.0))
    assert [_compat.is_ref(v) for v in jaxpr.eqns[0].outvars] == [True]
    assert [_compat.is_ref(v) for v in jaxpr.invars] == [False]


def test_the_effects_of_refs_and_axes_are_known_and_others_are_not():
    def step(x):
        ref = jax.new_ref(x)
        ref[...] = lax.psum(ref[...], "replica")
        jax.ref.addupdate(ref, (), 1.0)
        jax.debug.print("{}", x)
        return jax.ref.freeze(ref)

    hidden = [
        eqn.primitive.name
        for eqn in all_eqns(traced(step, 1.0))
        if _compat.has_hidden_effects(eqn)
    ]
    assert hidden == ["debug_print"]


@pytest.mark.parametrize(
    "collective",
    [
        lambda x: lax.axis_index("replica"),
        lambda x: lax.psum(x, "replica"),
        lambda x: lax.pmax(x, "replica"),
        lambda x: lax.all_gather(x, "replica"),
        lambda x: lax.ppermute(x, "replica", [(0, 1)]),
        lambda x: lax.all_to_all(x, "replica", 0, 0, tiled=True),
        lambda x: lax.psum_scatter(x, "replica"),
    ],
)
def test_names_axis(collective):
    eqn = only_eqn(collective, jnp.ones(2))
    assert _compat.names_axis(eqn, "replica")
    assert not _compat.names_axis(eqn, "other")
    assert not _compat.is_plain(eqn)


def test_is_plain():
    assert _compat.is_plain(only_eqn(lambda x: x.sum(0), jnp.ones((2, 2))))
    assert _compat.is_plain(only_eqn(lambda x: x + x, 1.0))
    assert not _compat.is_plain(only_eqn(jax.jit(jnp.sin), 1.0))


def test_is_jax_primitive():
    names = set()

    def step(x):
        ref = jax.new_ref(x)
        keys = jax.random.split(jax.random.key(0))
        x = lax.optimization_barrier(jnp.sort(x)) + jax.random.normal(keys[0], (4,))
        ref[...] = lax.psum(jnp.linalg.qr(jnp.outer(x, x))[0][0], "replica")
        return jax.ref.freeze(ref)

    for eqn in all_eqns(traced(step, jnp.ones(4))):
        names.add(eqn.primitive.name)
        assert _compat.is_jax_primitive(eqn.primitive), eqn.primitive
    assert {"optimization_barrier", "swap", "psum", "random_bits"} <= names
    assert not _compat.is_jax_primitive(Primitive("psum"))


def test_expand_hi_primitive():
    eqns = [
        eqn
        for eqn in all_eqns(traced(jnp.searchsorted, jnp.ones(4), jnp.ones(2)))
        if eqn.primitive.name == "call_hi_primitive"
    ]
    for eqn in eqns:  # jax 0.10 has none of them
        jaxpr = _compat.expand_hi_primitive(eqn)
        assert len(jaxpr.invars) == len(eqn.invars)
        assert len(jaxpr.outvars) == len(eqn.outvars)
    assert eqns or jax.__version_info__ < (0, 11)


def test_is_checkpoint():
    assert _compat.is_checkpoint(only_eqn(jax.checkpoint(jnp.sin), 1.0))
    assert not _compat.is_checkpoint(only_eqn(jax.jit(jnp.sin), 1.0))


def test_checkpoint_label():
    name = jax.ad_checkpoint.checkpoint_name
    assert _compat.checkpoint_label(only_eqn(lambda x: name(x, "here"), 1.0)) == "here"
    assert _compat.checkpoint_label(only_eqn(jnp.sin, 1.0)) is None


def loss(x):
    return jnp.sin(x) * 2


def test_name_stack_and_frames_of_a_backward_pass():
    backward = [
        eqn
        for eqn in all_eqns(traced(lambda x: jax.grad(loss)(x), 1.0))
        if "transpose(" in _compat.name_stack(eqn)
    ]
    assert backward
    for eqn in backward:
        frames = _compat.frames(eqn)
        functions = [function for _, _, function in frames]
        calls = [_compat.is_gradient_call(file, name) for file, _, name in frames]
        assert any(calls)
        assert functions.index("loss") < calls.index(True)
        assert not any(calls[len(calls) - calls[::-1].index(True) :])
        assert all(line > 0 for _, line, _ in frames)


def test_the_frames_of_an_inner_jaxpr_end_at_its_function():
    def body(carry, _):
        return jnp.sin(carry), None

    def step(x):
        return lax.scan(body, x, None, length=2)

    (sin,) = (e for e in all_eqns(traced(step, 1.0)) if e.primitive.name == "sin")
    functions = [function.split(".")[-1] for _, _, function in _compat.frames(sin)]
    assert "body" in functions
    assert "step" not in functions


@pytest.mark.parametrize(
    "file",
    [
        *(jax.__file__, flax.__file__, optax.__file__, replicax.__file__),
        *(_compat.__file__, lax.__file__, os.__file__, "<frozen runpy>"),
        os.path.join(os.path.dirname(os.__file__), "functools.py"),
    ],
)
def test_a_librarys_file(file):
    assert _compat.is_library_file(file)


def test_the_rooms_of_replicax_are_a_library():
    from replicax.datasets import __file__ as datasets
    from replicax.strategies import __file__ as strategies

    assert _compat.is_library_file(datasets)
    assert _compat.is_library_file(strategies)


@pytest.mark.parametrize(
    "file",
    [
        *(__file__, "<stdin>", "<ipython-input-1>", "/home/me/jax/train.py"),
        os.path.join(os.path.dirname(os.__file__), "site-packages", "mine", "step.py"),
    ],
)
def test_a_users_file(file):
    assert not _compat.is_library_file(file)


def test_bind():
    add = only_eqn(lambda x: x + 1.0, jnp.ones(5))
    (shorter,) = _compat.bind(add, [jnp.ones(2), jnp.full(2, 3.0)])
    assert shorter.tolist() == [4.0, 4.0]
    split = only_eqn(lambda x: lax.split(x, (1, 1)), jnp.arange(2.0))
    assert [x.tolist() for x in _compat.bind(split, [jnp.ones(2)])] == [[1.0], [1.0]]


def test_is_jax_file():
    assert _compat.is_jax_file(jax.__file__)
    assert not _compat.is_jax_file(optax.__file__)
    assert not _compat.is_jax_file(__file__)
