"""What is trained: three small problems, each written once for all contenders.

A problem's ``step`` is one replica's training step. It leaves open how gradients are
averaged over replicas, the only line that differs between the ways of running it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Mean = Callable[[Any], Any]
LAYERS = (784, 512, 512, 10)
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Problem:
    """A model, its optimizer and its data.

    Attributes:
      name: What it is called in a line.
      title: What it is, in full.
      state: The initial training state, a pytree of arrays on the default device.
      batch: One global batch, a pytree of numpy arrays of shape `[rows, ...]`.
      step: `(state, batch, mean) -> (state, loss)`, for the rows of one replica;
        `mean` averages a pytree over the replicas.
      params: The initial parameters, a part of the state.
      loss_fn: `(params, batch) -> loss`, the mean over the rows of one replica.
      optimizer: The Optax transformation that makes the same steps.
    """

    name: str
    title: str
    state: Any
    batch: Any
    step: Callable[[Any, Any, Mean], tuple[Any, jax.Array]]
    params: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    optimizer: optax.GradientTransformation


def thousand_floats(rows: int) -> Problem:
    """Plain SGD on 1,000 floats: next to no work, so that overhead shows.

    Args:
      rows: Rows of the global batch, shape `[rows, 1000]`.
    """

    def loss_fn(w, x):
        return jnp.mean(jnp.square(x - w))

    def step(w, x, mean):
        loss, gradient = jax.value_and_grad(loss_fn)(w, x)
        return w - 0.1 * mean(gradient), loss

    x = np.random.default_rng(0).normal(size=(rows, 1000)).astype(np.float32)
    w = jnp.zeros(1000)
    title = "SGD on 1,000 floats"
    return Problem("1,000 floats", title, w, x, step, w, loss_fn, optax.sgd(0.1))


def classification_batch(rows: int, *shape: int) -> dict[str, np.ndarray]:
    """Random examples and labels: `image` of `[rows, *shape]`, `label` of `[rows]`."""
    random = np.random.default_rng(0)
    return {
        "image": random.normal(size=(rows, *shape)).astype(np.float32),
        "label": random.integers(0, 10, size=rows).astype(np.int32),
    }


def cross_entropy(logits: jax.Array, label: jax.Array) -> jax.Array:
    """Mean cross entropy, logits `[rows, classes]`, integer labels `[rows]`."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return losses.mean()


def _classifier(
    name: str, title: str, params: Any, apply: Callable, batch: Any
) -> Problem:
    """A classifier trained with Adam; its state is `(params, optimizer state)`."""
    optimizer = optax.adam(LEARNING_RATE)

    def loss_fn(params, batch):
        return cross_entropy(apply(params, batch["image"]), batch["label"])

    def step(state, batch, mean):
        params, slots = state
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, slots = optimizer.update(mean(gradients), slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    state = params, optimizer.init(params)
    return Problem(name, title, state, batch, step, params, loss_fn, optimizer)


def _dense(key: jax.Array, rows: int, columns: int) -> dict[str, jax.Array]:
    w = jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5
    return {"w": w, "b": jnp.zeros(columns)}


def mlp(rows: int = 256) -> Problem:
    """The perceptron 784-512-512-10 with ReLU, trained with Adam."""
    keys = jax.random.split(jax.random.key(0), len(LAYERS) - 1)
    sizes = itertools.pairwise(LAYERS)
    params = [_dense(key, *size) for key, size in zip(keys, sizes, strict=True)]

    def apply(params, x):
        *hidden, last = params
        for layer in hidden:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ last["w"] + last["b"]

    title = f"MLP {'-'.join(map(str, LAYERS))}, Adam, batch {rows}"
    batch = classification_batch(rows, LAYERS[0])
    return _classifier("MLP", title, params, apply, batch)


def convnet(rows: int = 128, max_pool: bool = False) -> Problem:
    """Two 3x3 convolutions (32 and 64 channels) and a dense layer, with Adam.

    Args:
      rows: Rows of the global batch, images of `[28, 28, 1]`.
      max_pool: Halve the images by max-pooling rather than by strided convolutions.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "conv1": jax.random.normal(keys[0], (3, 3, 1, 32)) * (2 / 9) ** 0.5,
        "conv2": jax.random.normal(keys[1], (3, 3, 32, 64)) * (2 / 288) ** 0.5,
        "dense": _dense(keys[2], 7 * 7 * 64, 10),
    }

    def halving_conv(x, kernel):
        stride = 1 if max_pool else 2
        x = jax.lax.conv_general_dilated(
            x,
            kernel,
            window_strides=(stride, stride),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        x = jax.nn.relu(x)
        if max_pool:
            window = (1, 2, 2, 1)
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")
        return x

    def apply(params, x):
        x = halving_conv(halving_conv(x, params["conv1"]), params["conv2"])
        return x.reshape(x.shape[0], -1) @ params["dense"]["w"] + params["dense"]["b"]

    name = "ConvNet with max-pooling" if max_pool else "strided ConvNet"
    title = f"{name}, 28x28x1, Adam, batch {rows}"
    batch = classification_batch(rows, 28, 28, 1)
    return _classifier(name, title, params, apply, batch)
