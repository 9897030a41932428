"""The proof that an update may run on slices, against updates that really do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from replicax.strategies.elementwise import prove_elementwise

PARAMS = {
    "b": np.linspace(-1.0, 1.0, 7, dtype=np.float32),
    "scale": np.float32(2.0),
    "w": np.linspace(-2.0, 3.0, 15, dtype=np.float32).reshape(5, 3),
}
N = 2
SCHEDULE = optax.exponential_decay(0.1, 2, 0.9)


def matrices_only(params):
    return jax.tree.map(lambda x: jnp.ndim(x) > 1, params)


ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "nesterov": optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "adam": optax.adam(SCHEDULE),
    "adamw": optax.adamw(0.1, weight_decay=0.1, mask=matrices_only),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(SCHEDULE),
    "rmsprop": optax.rmsprop(0.1, momentum=0.9, centered=True),
    "adagrad": optax.adagrad(0.1),
    "adadelta": optax.adadelta(0.1),
    "lion": optax.lion(0.1),
    "clip": optax.chain(optax.clip(0.3), optax.trace(0.9), optax.scale(-0.1)),
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 2),
    "masked": optax.masked(optax.adam(0.1), {"b": True, "scale": False, "w": True}),
    "multi_transform": optax.multi_transform(
        {"x": optax.adam(0.1), "y": optax.sgd(0.1, 0.9)},
        {"b": "x", "scale": "x", "w": "y"},
    ),
    "radam": optax.radam(0.1),
    "keep_params_nonnegative": optax.keep_params_nonnegative(),
}

MIXING = {
    "clip_by_global_norm": (optax.clip_by_global_norm(1.0), "a sum over elements of"),
    "clip_by_block_rms": (optax.clip_by_block_rms(1.0), "a sum over elements of"),
    "lamb": (optax.lamb(0.1), "a sum over elements of"),
    "lars": (optax.lars(0.1), "a sum over elements of"),
    "adafactor": (optax.adafactor(0.1, min_dim_size_to_factor=2), "a sum over"),
    "add_noise": (optax.add_noise(0.1, 0.5, key=0), "an array that is no slot"),
    "centralize": (optax.centralize(), "a sum over elements of ['w']"),
    "adaptive_grad_clip": (optax.adaptive_grad_clip(0.1), "a sum over elements of"),
    "normalize": (optax.normalize_by_update_norm(), "a sum over elements of"),
    "zero_nans": (optax.zero_nans(), "found_nan['w'] depends on a condition on any"),
    "apply_if_finite": (optax.apply_if_finite(optax.sgd(0.1), 3), "all elements of"),
}


def proof_of(tx, params=PARAMS):
    return prove_elementwise(tx.update, params, tx.init(params), params)


def gradients(step):
    random = np.random.default_rng(step)
    return jax.tree.map(
        lambda x: random.normal(size=x.shape).astype(np.float32), PARAMS
    )


def slices_of(x, n=N):
    """The flattened array, padded with zeros, in ``n`` slices."""
    flat = np.ravel(x)
    return np.pad(flat, (0, -flat.size % n)).reshape(n, -1)


def sliced(tree, flags, r):
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(
        slices_of(x)[r] if flag else x for x, flag in zip(leaves, flags, strict=True)
    )


def joined(parts, like, flags):
    """The whole leaves again; those that are held whole must be equal everywhere."""
    leaves = zip(*map(jax.tree.leaves, parts), strict=True)
    whole = []
    for each, x, flag in zip(leaves, jax.tree.leaves(like), flags, strict=True):
        if flag:
            whole.append(np.concatenate(each)[: np.size(x)].reshape(np.shape(x)))
        else:
            np.testing.assert_array_equal(*each)
            whole.append(each[0])
    return whole


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_slices_are_updated_as_the_whole_is(name):
    tx = ELEMENTWISE[name]
    params, state = PARAMS, tx.init(PARAMS)
    proof = prove_elementwise(tx.update, params, state, params)
    assert proof.reasons == ()
    assert proof.param_sliced == (True, False, True)
    owned = [owner is not None for owner in proof.slot_owners]
    states = [sliced(state, owned, r) for r in range(N)]
    update, update_slices = jax.jit(tx.update), jax.jit(proof.update)
    for step in range(3):
        grads = gradients(step)
        made = [
            update_slices(
                sliced(grads, proof.param_sliced, r),
                states[r],
                sliced(params, proof.param_sliced, r),
            )
            for r in range(N)
        ]
        states = [state for _, state in made]
        updates, state = update(grads, state, params)
        flags = [*proof.param_sliced, *owned]
        for ours, expected in zip(
            joined(made, (updates, state), flags),
            jax.tree.leaves((updates, state)),
            strict=True,
        ):
            assert ours.dtype == expected.dtype
            np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=1e-7)
        params = jax.tree.map(np.asarray, optax.apply_updates(params, updates))


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_elements_is_named(name):
    tx, why = MIXING[name]
    proof = proof_of(tx)
    assert not proof.holds
    assert any(why in reason for reason in proof.reasons), proof.reasons
    assert all("optax/" in reason for reason in proof.reasons), proof.reasons
    with pytest.raises(ValueError, match="depends on"):
        proof.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_leaves_that_are_held_whole_may_be_mixed():
    tx = optax.clip_by_block_rms(0.1)
    whole = prove_elementwise(
        tx.update, PARAMS, tx.init(PARAMS), PARAMS, sliced=[False] * 3
    )
    assert whole.holds
    one = prove_elementwise(
        tx.update, PARAMS, tx.init(PARAMS), PARAMS, sliced=[False, False, True]
    )
    assert len(one.reasons) == 1
    assert one.reasons[0].startswith("The update of ['w'] depends on a sum over")


def stateless(fn):
    return optax.stateless(lambda grads, params: fn(grads))


def reasons_of(fn, *leaves):
    return proof_of(stateless(fn), list(leaves)).reasons


def test_one_parameter_may_not_depend_on_another():
    a, b = np.zeros(4, np.float32), np.ones(4, np.float32)
    (reason,) = reasons_of(lambda g: [g[0], g[0] + g[1]], a, b)
    assert reason.startswith("The update of [1] depends on another parameter at test_")
    swapped = reasons_of(lambda g: [g[1], g[0]], a, b)
    assert swapped == (
        "The update of [0] depends on another parameter.",
        "The update of [1] depends on another parameter.",
    )


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (lambda g: [g[0] @ g[0]], "a matrix product with"),
        (lambda g: [g[0].T], "a transposition of"),
        (lambda g: [g[0][::-1]], "moves or combines elements of"),
        (lambda g: [jnp.sort(g[0])], "a sort of"),
        (lambda g: [jnp.cumsum(g[0]).reshape(3, 3)], "running sums of"),
        (lambda g: [g[0] * jnp.arange(9.0).reshape(3, 3)], "no slot of"),
        (lambda g: [g[0] * np.eye(3, dtype=np.float32)], "no slot of"),
        (lambda g: [jnp.eye(3)], "does not follow from its gradient"),
        (lambda g: [lax.scan(lambda c, x: (c, x * 2), 0.0, g[0])[1]], "rows of"),
        (
            lambda g: [lax.while_loop(lambda x: x.sum() < 3, lambda x: x + 1, g[0])],
            "a sum over",
        ),
        (lambda g: [lax.cond(g[0][0, 0] > 0, lambda: g[0], lambda: -g[0])], "slice"),
    ],
)
def test_what_mixes_within_a_parameter(fn, word):
    (reason,) = reasons_of(fn, np.ones((3, 3), np.float32))
    assert word in reason


CONTROL_FLOW = {
    "scan": lambda g: lax.scan(lambda c, r: (c * r, r), g, jnp.arange(1.0, 4.0))[0],
    "scan from zeros": lambda g: lax.fori_loop(
        0, 3, lambda i, c: c + g, jnp.zeros_like(g)
    ),
    "while": lambda g: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, g)
    )[1],
    "cond": lambda g: lax.cond(
        jnp.arange(3).sum() > 2, jnp.zeros_like, lambda x: x * 2, g
    ),
    "nested": lambda g: jax.jit(lambda x: lax.cond(True, jax.nn.relu, jnp.sin, x))(g),
    "stop_gradient": lambda g: lax.stop_gradient(g) * 2,
    "reshaped": lambda g: (g.reshape(-1)[None] * 2).reshape(g.shape),
    "by its size": lambda g: g * g.size + g.ndim + jnp.ones_like(g).sum(),
    "stacked": lambda g: g * lax.scan(lambda c, _: (c + 1, c), 1.0, None, 3)[1].sum(),
}


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_control_flow_runs_on_slices(name):
    fn = CONTROL_FLOW[name]
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)
    tx = stateless(lambda g: [fn(g[0])])
    proof = proof_of(tx, [x])
    assert proof.reasons == ()
    made = [proof.update([s], tx.init([x]), [s])[0][0] for s in slices_of(x)]
    np.testing.assert_allclose(np.concatenate(made).reshape(3, 2), fn(x), rtol=1e-6)


def test_a_random_number_for_all_elements_is_no_noise():
    def update(grads, key, params=None):
        def again(_, carry):
            key, x = carry
            key, new = jax.random.split(key)
            return key, x * jax.random.normal(new)

        key, scale = jax.lax.fori_loop(0, 2, again, (key, 1.0))
        return [grads[0] * scale], key

    x, key = np.arange(6, dtype=np.float32), jax.random.key(0)
    proof = prove_elementwise(update, [x], key, [x])
    assert proof.reasons == ()
    made = [proof.update([s], key, [s]) for s in slices_of(x)]
    ([whole], next_key) = update([x], key)
    np.testing.assert_allclose(np.concatenate([u for [u], _ in made]), whole, 1e-6)
    assert all(state == next_key for _, state in made)


def test_what_no_output_needs_may_be_mixed():
    def loop(g):
        total, _ = lax.scan(lambda c, row: (c + row.sum(), row * 2), 0.0, g)
        return lax.cond(True, lambda t, x: (t, x), lambda t, x: (t, -x), total, g)[1]

    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    proof = proof_of(stateless(lambda g: [loop(g[0])]), [x])
    assert proof.reasons == ()
    for s in slices_of(x):
        np.testing.assert_array_equal(
            proof.update([s], optax.EmptyState(), [s])[0][0], s
        )


def test_arguments_that_do_not_fit_are_refused():
    tx = optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"one flag per parameter, 3\. Got 1"):
        prove_elementwise(tx.update, PARAMS, tx.init(PARAMS), PARAMS, sliced=[True])
    with pytest.raises(ValueError, match="structure of the parameters"):
        prove_elementwise(tx.update, [1.0], tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="the proof was made with"):
        proof_of(tx).update([1.0], tx.init(PARAMS), PARAMS)
