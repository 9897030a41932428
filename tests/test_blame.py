"""The sentence that says why a value varies names the cause and the user's line."""

import pathlib

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Primitive
from replicax.strategies.blame import explain
from replicax.strategies.replication import ASSERT_MIRRORED, prove

SOURCE = pathlib.Path(__file__)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


def here(tag, function):
    """``file:line (function)`` of the line of this file that ends in ``# tag``."""
    lines = SOURCE.read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {tag}"))
    return f"{SOURCE.name}:{number} ({function})"


def why(step, output=0):
    """Why an output of ``step(w, x)`` varies, where ``x`` does."""
    w, x = jnp.ones((2, 2)), jnp.ones((4, 2))
    jaxpr = jax.make_jaxpr(step, axis_env=[("replica", 2)])(w, x)
    return explain(jaxpr, [False, True], output, ["params['w']", "batch['x']"])


def loss_fn(w, x):
    return jnp.where(x @ w > 0, x @ w, 0.5 * x @ w).sum()  # forward


def by_grad(w, x):
    grads = jax.grad(loss_fn)(w, x)  # grad
    return w - 0.1 * grads


def by_value_and_grad(w, x):
    loss, grads = jax.value_and_grad(loss_fn)(w, x)  # value_and_grad
    return grads, lax.pmean(loss, "replica")


def by_vjp(w, x):
    _, pull = jax.vjp(lambda w: loss_fn(w, x), w)  # vjp
    return pull(1.0)[0]


def by_grad_of_jit(w, x):
    return jax.grad(jax.jit(loss_fn))(w, x)  # grad of jit


def by_jit_of_grad(w, x):
    @jax.jit
    def inner(w):
        return jax.grad(loss_fn)(w, x)  # jit of grad

    return inner(w)


def by_nnx_grad(w, x):
    return flax.nnx.grad(loss_fn)(w, x)  # nnx grad


def by_remat(w, x):
    return jax.grad(jax.checkpoint(loss_fn))(w, x)  # grad of remat


def in_a_scan(w, x):
    def body(w, row):
        return w - jax.grad(loss_fn)(w, row[None]), None  # grad in scan

    return lax.scan(body, w, x)[0]


def with_optax(w, x):
    grads = jax.grad(loss_fn)(w, x)  # grad for optax
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    updates, _ = tx.update(grads, tx.init(w))
    return optax.apply_updates(w, updates)


def into_a_ref(w, x):
    ref = jax.new_ref(w)
    grads = jax.grad(loss_fn)(w, x)  # grad for ref
    lax.fori_loop(0, 2, lambda i, c: (ref.__setitem__(..., grads), c)[1], 0)
    return jax.ref.freeze(ref)


@pytest.mark.parametrize(
    ("step", "tag", "function"),
    [
        (by_grad, "grad", "by_grad"),
        (by_value_and_grad, "value_and_grad", "by_value_and_grad"),
        (by_vjp, "vjp", "by_vjp"),
        (by_grad_of_jit, "grad of jit", "by_grad_of_jit"),
        (by_jit_of_grad, "jit of grad", "inner"),
        (by_nnx_grad, "nnx grad", "by_nnx_grad"),
        (by_remat, "grad of remat", "by_remat"),
        (in_a_scan, "grad in scan", "body"),
        (with_optax, "grad for optax", "with_optax"),
        (into_a_ref, "grad for ref", "into_a_ref"),
    ],
)
def test_a_gradient_is_blamed_on_the_line_that_took_it(step, tag, function):
    assert why(step) == (
        f"depends on a gradient computed at {here(tag, function)} "
        "that no all_reduce has combined"
    )


def forward(w, x):
    return loss_fn(w, x)


def doubled(w, x):
    return x * 2  # double


def scanned(w, x):
    def body(total, row):
        return total + row, None  # row

    return lax.scan(body, w[0], x)[0]


def where_it_varies(w, x):
    return jnp.where(x > 0, w[0], w[1])  # where


def by_predicate(w, x):
    return lax.cond(x[0, 0] > 0, lambda: w, lambda: -w)  # predicate


def until(w, x):
    return lax.while_loop(lambda i: i < x[0, 0], lambda i: i + 1, 0.0)  # until


@pytest.mark.parametrize(
    ("step", "tag", "function"),
    [
        (forward, "forward", "loss_fn"),
        (doubled, "double", "doubled"),
        (scanned, "row", "body"),
        (where_it_varies, "where", "where_it_varies"),
        (by_predicate, "predicate", "by_predicate"),
        (until, "until", "<lambda>"),
    ],
)
def test_an_input_is_blamed_on_the_line_that_uses_it_first(step, tag, function):
    assert why(step) == (
        "depends on input batch['x'] (one value per replica) at " + here(tag, function)
    )


def test_an_input_returned_as_it_is_has_no_line():
    expected = "depends on input batch['x'] (one value per replica)"
    assert why(lambda w, x: x) == expected


def replica_id(w, x):
    return w + lax.axis_index("replica")  # id


@jax.jit
def helper():
    return lax.axis_index("replica")  # helper


def in_a_helper(w, x):
    return lax.scan(lambda c, _: (c + helper(), None), w, None, length=2)[0]


def random(w, x):
    return w + lax.rng_uniform(0.0, 1.0, (2,))  # random


def own_noise(w, x):
    key = jax.random.key(0)
    key = jax.random.fold_in(key, lax.axis_index("replica"))  # own key
    return w + jax.random.normal(key, (2,))


def on_the_host(w, x):
    return jax.pure_callback(lambda: np.float32(0), SCALAR) + w  # callback


def permuted(w, x):
    return lax.ppermute(w, "replica", [(0, 1)])  # ppermute


def scattered(w, x):
    return lax.psum_scatter(jax.grad(loss_fn)(w, x), "replica")  # scatter


def grouped(w, x):
    return lax.psum(w, "replica", axis_index_groups=[[0], [1]])  # groups


def foreign(w, x):
    return jax.ffi.ffi_call("the_users", SCALAR)(w)  # foreign


own_p = Primitive("fused_step")
own_p.def_abstract_eval(lambda x: x)


def own_primitive(w, x):
    return own_p.bind(w)  # own primitive


@pytest.mark.parametrize(
    ("step", "what", "tag", "function"),
    [
        (replica_id, "the replica id (axis_index)", "id", None),
        (in_a_helper, "the replica id (axis_index)", "helper", "helper"),
        (own_noise, "the replica id (axis_index)", "own key", None),
        (
            random,
            "a random number generator with hidden state (rng_uniform)",
            *("random", None),
        ),
        (on_the_host, "a host callback (pure_callback)", "callback", None),
        (
            permuted,
            "a collective that gives each replica another part (ppermute)",
            *("ppermute", None),
        ),
        (
            scattered,
            "a collective that gives each replica another part (reduce_scatter)",
            *("scatter", None),
        ),
        (grouped, "a collective over groups of replicas (psum)", "groups", None),
        (
            foreign,
            "a computation that cannot be looked into (ffi_call)",
            *("foreign", None),
        ),
        (
            own_primitive,
            "the primitive fused_step, which is not one of JAX's own",
            *("own primitive", None),
        ),
    ],
)
def test_what_varies_by_itself_is_named(step, what, tag, function):
    line = here(tag, function or step.__name__)
    assert why(step) == f"depends on {what} at {line}"


def test_one_leaf_that_was_not_reduced():
    def step(w, x):
        grads = jax.grad(loss_fn)(w, x)  # one leaf
        return lax.pmean(grads, "replica"), grads

    with pytest.raises(ValueError, match="Output 0 is equal on all replicas"):
        why(step, 0)
    assert here("one leaf", "step") in why(step, 1)


def test_without_a_frame_of_the_users_no_line_is_named():
    jaxpr = jax.make_jaxpr(jnp.sin)(1.0)
    clause = explain(jaxpr, [True], 0, ["x"])
    assert clause == "depends on input x (one value per replica)"


def test_an_input_without_a_name():
    jaxpr = jax.make_jaxpr(lambda x: x)(1.0)
    clause = explain(jaxpr, [True], 0, [])
    assert clause == "depends on an input (one value per replica)"


# -- problems ------------------------------------------------------------------------


def message_of(step):
    w, x = jnp.ones((2, 2)), jnp.ones((4, 2))
    jaxpr = jax.make_jaxpr(step, axis_env=[("replica", 2)])(w, x)
    proof = prove(jaxpr, [False, True], input_names=["w", "x"])
    (problem,) = proof.problems
    return problem.message


def test_a_collective_under_a_varying_predicate():
    def summed(w):
        return lax.psum(w, "replica")  # skipped

    def step(w, x):
        return lax.cond(
            x.sum() > 0,  # sum
            summed,
            lambda w: w,
            w,
        )

    message = message_of(step)
    assert message.startswith(
        f"The collective psum at {here('skipped', 'summed')} stands in a lax.cond at "
    )
    assert (
        "whose predicate differs between replicas: it depends on input x (one value "
        f"per replica) at {here('sum', 'step')}." in message
    )
    assert "all_reduce" in message


def test_a_write_under_checkpoint():
    def step(w, x):
        count = jax.new_ref(jnp.zeros(()))

        def loss(w):
            count[...] = count[...] + 1  # written twice
            return w.sum()

        return jax.checkpoint(loss)(w)

    assert message_of(step).startswith(
        f"A variable is written at {here('written twice', 'loss')} under "
        "jax.checkpoint, which may run this twice"
    )


def test_a_predicate_that_reads_what_its_loop_writes():
    def step(w, x):
        count = jax.new_ref(jnp.zeros(()))

        def body(i):
            count[...] = count[...] + 1
            return i + 1

        return lax.while_loop(lambda i: count[...] < 3, body, 0)  # loop

    assert message_of(step).startswith(
        f"The predicate of the lax.while_loop at {here('loop', 'step')} uses a "
        "variable that is written inside the loop."
    )


def test_an_assertion_that_does_not_hold():
    def step(w, x):
        grads = jax.grad(loss_fn)(w, x)  # asserted
        label = ASSERT_MIRRORED + "state['w']"
        return jax.ad_checkpoint.checkpoint_name(grads, label)

    assert message_of(step) == (
        "state['w'] would differ between replicas: it depends on a gradient computed "
        f"at {here('asserted', 'step')} that no all_reduce has combined."
    )
