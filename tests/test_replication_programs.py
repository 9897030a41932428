"""The replication proof accepts the training programs that people write.

Each program takes mirrored parameters, a batch that varies, and ``reduce``: the
all-reduce. All of its outputs must be proved mirrored, and some must vary where
``reduce`` is left out. They are traced, not compiled.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from replicax.strategies.replication import prove

PARAMS = {"b": jnp.zeros(4), "table": jnp.ones((6, 4)), "w": jnp.ones((4, 4))}
BATCH = {"id": jnp.zeros(8, int), "x": jnp.ones((8, 4)), "y": jnp.ones((8, 4))}


def loss_of(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"] + params["table"][batch["id"]])
    return jnp.mean((hidden + params["b"] - batch["y"]) ** 2)


def gradients(params, batch, reduce, loss=loss_of):
    return reduce(jax.grad(loss)(params, batch))


def descend(params, grads, rate=0.1):
    return jax.tree.map(lambda p, g: p - rate * g, params, grads)


def summed(tree):
    return sum(jnp.sum(x) for x in jax.tree.leaves(tree))


# -- ways to make a program ----------------------------------------------------------


def trained(tx):
    """A step of an optax optimizer."""

    def step(params, batch, reduce):
        grads = gradients(params, batch, reduce)
        updates, state = tx.update(grads, tx.init(params), params)
        return optax.apply_updates(params, updates), state

    return step


def with_loss(loss):
    """The gradients of another loss."""
    return lambda params, batch, reduce: gradients(params, batch, reduce, loss)


def on_mean(function):
    """A function of a matrix that is the mean of the replicas' batches."""
    return lambda params, batch, reduce: function(
        reduce(batch["x"][:4]) + 4 * jnp.eye(4)
    )


# -- programs ------------------------------------------------------------------------


def clipped_by_hand(params, batch, reduce):
    grads = gradients(params, batch, reduce)
    scale = jnp.minimum(1.0, 1.0 / optax.tree.norm(grads))
    return jax.tree.map(lambda g: g * scale, grads)


def loss_scaled(params, batch, reduce):
    scale = jnp.float32(1024)
    grads = gradients(params, batch, reduce, lambda p, b: scale * loss_of(p, b))
    finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in grads.values()]))
    return lax.cond(
        finite,
        lambda: (descend(params, grads, 1 / scale), scale),
        lambda: (params, scale / 2),
    )


def flag_reduced(params, batch, reduce):
    norm = optax.tree.norm(jax.grad(loss_of)(params, batch))
    finite = reduce(jnp.isfinite(norm).astype(jnp.float32))
    return lax.cond(finite > 0.5, lambda: params, lambda: PARAMS)


def accumulated(params, batch, reduce):
    def add(total, row):
        return jax.tree.map(jnp.add, total, jax.grad(loss_of)(params, row)), None

    rows = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
    return reduce(lax.scan(add, jax.tree.map(jnp.zeros_like, params), rows)[0])


def several_steps(params, batch, reduce):
    def step(params, _):
        return descend(params, gradients(params, batch, reduce)), None

    return lax.scan(step, params, None, length=3)[0]


def averaged(params, batch, reduce):
    new = descend(params, gradients(params, batch, reduce))
    return optax.incremental_update(new, params, 0.1)


@jax.custom_vjp
def squared_error(prediction, target):
    return jnp.mean((prediction - target) ** 2)


squared_error.defvjp(
    lambda p, t: (squared_error(p, t), (p, t)), lambda r, g: (g * (r[0] - r[1]), None)
)


def batch_norm(params, batch, reduce):
    mean = reduce(batch["x"].mean(0))
    variance = reduce(((batch["x"] - mean) ** 2).mean(0))

    def loss(params, batch):
        x = (batch["x"] - mean) * lax.rsqrt(variance + 1e-5)
        return loss_of(params, {**batch, "x": x})

    return gradients(params, batch, reduce, loss), mean, variance


def until_converged(params, batch, reduce):
    def step(state):
        params, _, count = state
        grads = gradients(params, batch, reduce)
        return descend(params, grads), optax.tree.norm(grads), count + 1

    return lax.while_loop(
        lambda s: (s[1] > 1e-3) & (s[2] < 5), step, (params, jnp.float32(1), 0)
    )


def by_schedule(params, batch, reduce):
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 10, 100)(7)
    return descend(params, gradients(params, batch, reduce), rate)


def by_phase(params, batch, reduce):
    grads = gradients(params, batch, reduce)
    phase = params["b"][0].astype(int)
    return lax.switch(
        phase, [lambda: params, lambda: grads, lambda: jax.tree.map(jnp.sign, grads)]
    )


def with_dropout(params, batch, reduce):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, (4,))

    def loss(params, batch):
        return loss_of({**params, "b": jnp.where(keep, params["b"], 0)}, batch)

    return gradients(params, batch, reduce, loss)


def with_dropout_of_each_replica(params, batch, reduce):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("replica"))
    keep = jax.random.bernoulli(key, 0.9, (4,))

    def loss(params, batch):
        return loss_of({**params, "b": jnp.where(keep, params["b"], 0)}, batch)

    return gradients(params, batch, reduce, loss)


def noise_from_one_key(params, batch, reduce):
    grads = gradients(params, batch, reduce)
    keys = jax.random.split(jax.random.key(0), len(grads))
    return {
        name: grad + jax.random.normal(key, grad.shape)
        for key, (name, grad) in zip(keys, grads.items(), strict=True)
    }


def in_a_ref(params, batch, reduce):
    variable = jax.new_ref(params["w"])

    def step(_, carry):
        grads = gradients({**params, "w": variable[...]}, batch, reduce)
        jax.ref.addupdate(variable, (), -0.1 * grads["w"])
        return carry

    lax.fori_loop(0, 3, step, 0)
    return jax.ref.freeze(variable)


def reduce_scatter_and_gather(params, batch, reduce):
    grads = jax.grad(loss_of)(params, batch)["w"]
    if reduce is leave:
        return grads
    part = lax.psum_scatter(grads, "replica", tiled=True)
    return lax.all_gather(part, "replica", tiled=True)


def gathered(params, batch, reduce):
    if reduce is leave:
        return batch["x"].sum()
    return lax.all_gather(batch["x"], "replica").sum(0)


def all_reduced_in_the_loss(params, batch, reduce):
    value, grads = jax.value_and_grad(lambda p: reduce(loss_of(p, batch)))(params)
    return value, reduce(grads)


def clipped_per_example(params, batch, reduce):
    rows = jax.tree.map(lambda x: x[:, None], batch)
    grads = jax.vmap(jax.grad(loss_of), (None, 0))(params, rows)
    norms = jax.vmap(optax.tree.norm)(grads)
    return reduce(jax.tree.map(lambda g: jnp.einsum("i,i...", 1 / norms, g), grads))


def metrics(params, batch, reduce):
    logits = batch["x"] @ params["w"]
    right = (jnp.argmax(logits, -1) == batch["id"]).sum()
    return reduce({"right": right, "best": logits.max()})


def printed(params, batch, reduce):
    grads = gradients(params, batch, reduce)
    jax.debug.print("loss {}", loss_of(params, batch))
    jax.debug.callback(lambda x: None, grads["b"])
    return grads


def convolved(params, batch):
    image = batch["x"].reshape(1, 8, 4, 1)
    kernel = params["w"].reshape(4, 4, 1, 1)
    out = lax.conv_general_dilated(
        image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    window = (1, 2, 2, 1)
    pooled = lax.reduce_window(out, -jnp.inf, lax.max, window, window, "VALID")
    return jax.nn.logsumexp(pooled) + summed(params)


def attention(params, batch):
    q, k = batch["x"] @ params["w"], batch["x"]
    mask = jnp.tril(jnp.ones((8, 8), bool))
    scores = jax.nn.softmax(jnp.where(mask, q @ k.T, -1e9))
    return jnp.einsum("ij,jk->", scores, batch["y"]) + summed(params)


def recurrent(params, batch):
    @jax.checkpoint
    def cell(hidden, x):
        return jnp.tanh(params["w"] @ hidden + x), None

    return lax.scan(cell, params["b"], batch["x"])[0].sum() + summed(params)


def classified(params, batch):
    logits = batch["x"] @ params["w"] + params["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["id"])
    return losses.mean() + params["table"].sum()


PROGRAMS = {
    "sgd": trained(optax.sgd(0.1, momentum=0.9, nesterov=True)),
    "adam": trained(optax.adam(1e-3)),
    "adamw": trained(optax.adamw(1e-3, mask={"w": True, "b": False, "table": False})),
    "lamb": trained(optax.lamb(1e-3)),
    "lion": trained(optax.lion(1e-3)),
    "adafactor": trained(optax.adafactor(1e-3)),
    "rmsprop": trained(optax.rmsprop(1e-3)),
    "clip_by_global_norm": trained(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    ),
    "multi_steps": trained(optax.MultiSteps(optax.adam(1e-3), 2)),
    "apply_if_finite": trained(optax.apply_if_finite(optax.adam(1e-3), 3)),
    "schedule": trained(optax.adam(optax.cosine_decay_schedule(0.1, 100))),
    "inject_hyperparams": trained(
        optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)
    ),
    "ema": trained(optax.chain(optax.ema(0.9), optax.sgd(0.1))),
    "by_schedule": by_schedule,
    "clipped_by_hand": clipped_by_hand,
    "clipped_per_example": clipped_per_example,
    "averaged": averaged,
    "loss_scaled": loss_scaled,
    "flag_reduced": flag_reduced,
    "accumulated": accumulated,
    "several_steps": several_steps,
    "remat": with_loss(jax.checkpoint(loss_of)),
    "remat_in_scan": with_loss(recurrent),
    "custom_vjp": with_loss(
        lambda p, b: squared_error(b["x"] @ p["w"], b["y"]) + summed(p)
    ),
    "cross_entropy": with_loss(classified),
    "embedding": with_loss(lambda p, b: (p["table"][b["id"]] ** 2).sum() + summed(p)),
    "one_hot": with_loss(
        lambda p, b: (jax.nn.one_hot(b["id"], 6) @ p["table"]).sum() + summed(p)
    ),
    "batch_norm": batch_norm,
    "convolved": with_loss(convolved),
    "attention": with_loss(attention),
    "nested_jit": with_loss(jax.jit(lambda p, b: jax.jit(loss_of)(p, b))),
    "jit_of_grad": lambda p, b, reduce: reduce(jax.jit(jax.grad(loss_of))(p, b)),
    "until_converged": until_converged,
    "by_phase": by_phase,
    "with_dropout": with_dropout,
    "with_dropout_of_each_replica": with_dropout_of_each_replica,
    "noise_from_one_key": noise_from_one_key,
    "in_a_ref": in_a_ref,
    "reduce_scatter_and_gather": reduce_scatter_and_gather,
    "gathered": gathered,
    "all_reduced_in_the_loss": all_reduced_in_the_loss,
    "metrics": metrics,
    "printed": printed,
    "bfloat16": lambda p, b, reduce: reduce(
        jax.tree.map(lambda g: g.astype(jnp.bfloat16), jax.grad(loss_of)(p, b))
    ),
    "hessian_vector": lambda p, b, reduce: reduce(
        jax.jvp(jax.grad(lambda q: loss_of(q, b)), (p,), (p,))[1]
    ),
    "fori": on_mean(lambda x: lax.fori_loop(0, 3, lambda i, c: c @ x + i, x)),
    "map": on_mean(lambda x: lax.map(lambda row: row.sum(), x)),
    "associative_scan": on_mean(lambda x: lax.associative_scan(jnp.add, x)),
    "cumulative": on_mean(lambda x: (jnp.cumsum(x, 0), lax.cummax(x))),
    "sort": on_mean(lambda x: (jnp.sort(x), jnp.argsort(x), lax.top_k(x, 2))),
    "qr": on_mean(jnp.linalg.qr),
    "cholesky": on_mean(lambda x: jnp.linalg.cholesky(x @ x.T)),
    "solve": on_mean(lambda x: jnp.linalg.solve(x, x)),
    "eigh": on_mean(lambda x: jnp.linalg.eigh(x + x.T)),
    "svd": on_mean(jnp.linalg.svd),
    "inverse_determinant": on_mean(lambda x: (jnp.linalg.inv(x), jnp.linalg.det(x))),
    "conjugate_gradients": on_mean(
        lambda x: jax.scipy.sparse.linalg.cg(lambda v: x @ (x.T @ v), x[0])[0]
    ),
    "fft": on_mean(jnp.fft.fft2),
    "interpolated": on_mean(
        lambda x: (jnp.interp(x, x[0], x[1]), jax.image.resize(x, (8, 8), "linear"))
    ),
    "nested_vmap": on_mean(jax.vmap(jax.vmap(jnp.sin))),
    "searched": on_mean(
        lambda x: (jnp.searchsorted(x[0], x[1]), jnp.unique(x, size=9))
    ),
}


# -- tests ---------------------------------------------------------------------------


def varies(fn):
    """For each output of ``fn(params, batch)``, whether it varies."""
    jaxpr = jax.make_jaxpr(fn, axis_env=[("replica", 4)])(PARAMS, BATCH)
    proof = prove(jaxpr, [False] * len(PARAMS) + [True] * len(BATCH))
    assert proof.problems == ()
    return proof.varies


def mean_over_replicas(tree):
    return jax.tree.map(lambda x: lax.pmean(x, "replica"), tree)


def leave(tree):
    return tree


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_usual_training_program_is_proved(name):
    program = PROGRAMS[name]
    assert not any(varies(lambda p, b: program(p, b, mean_over_replicas)))
    assert any(varies(lambda p, b: program(p, b, leave)))


def test_one_leaf_of_the_gradients_that_was_not_reduced():
    def step(params, batch):
        grads = jax.grad(loss_of)(params, batch)
        return {**mean_over_replicas(grads), "w": grads["w"]}

    assert varies(step) == (False, False, True)  # b, table, w
