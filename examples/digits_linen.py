"""The digits of ``digits.py``, with Flax linen and a functional train state.

Run it with::

    python examples/digits_linen.py --devices 4 --epochs 12 --batch-size 96

The step takes a state and returns a new one. Because its gradients are averaged over
the replicas, the new state is provably equal on all of them: it comes back as ordinary
arrays, while the loss, which differs, comes back as one value per replica.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import replicax as rx


class ConvNet(nn.Module):
    """Three convolutions, two of them striding, and a dense layer on top."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""
        x = nn.gelu(nn.Conv(16, (3, 3))(images))
        x = nn.gelu(nn.Conv(32, (3, 3), strides=2)(x))
        x = nn.gelu(nn.Conv(64, (3, 3), strides=2)(x))
        return nn.Dense(10)(x.reshape(x.shape[0], -1))


def train_step(state: TrainState, batch: tuple):
    """Returns the next state, and this replica's loss."""
    images, labels = batch

    def loss_fn(params):
        logits = state.apply_fn(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    grads = rx.get_replica_context().all_reduce("mean", grads)
    return state.apply_gradients(grads=grads), loss


def eval_step(state: TrainState, batch: tuple):
    """Returns whether each row is read correctly, and the mask of real rows."""
    images, labels, mask = batch
    correct = state.apply_fn(state.params, images).argmax(-1) == labels
    return jnp.sum(correct * mask), jnp.sum(mask)


def main() -> None:
    """Trains, evaluates, and prints the accuracy."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices")
    parser.add_argument("--epochs", type=int, default=12, help="at least 1")
    parser.add_argument("--batch-size", type=int, default=96, help="over all devices")
    args = parser.parse_args()

    rx.set_virtual_devices(args.devices)
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(args.devices)])

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:1440], order[1440:]

    dataset = rx.datasets.from_arrays((images[train], labels[train])).shuffle(seed=0)
    batches = strategy.experimental_distribute_dataset(
        dataset.batch(args.batch_size, drop_remainder=True)
    )
    # 357 test rows do not divide evenly: fill the batches up, and mask the filler.
    test_batches = strategy.experimental_distribute_dataset(
        rx.datasets.from_arrays((images[test], labels[test])).batch(100),
        rx.InputOptions(remainder="pad"),
    )

    with strategy.scope():
        model = ConvNet()
        schedule = optax.cosine_decay_schedule(2e-3, args.epochs * len(batches))
        state = TrainState.create(
            apply_fn=model.apply,
            params=jax.jit(model.init)(jax.random.key(0), images[:1]),
            tx=optax.adam(schedule),
        )

    for epoch in range(1, args.epochs + 1):
        losses = []
        for batch in batches:
            state, loss = strategy.run(train_step, args=(state, batch))
            losses.append(strategy.reduce("mean", loss))
        print(f"epoch {epoch}/{args.epochs}  loss {np.mean(losses):.4f}", flush=True)

    counts = [
        strategy.reduce("sum", strategy.run(eval_step, args=(state, batch)))
        for batch in test_batches
    ]
    correct, rows = np.sum(counts, axis=0)
    print(
        f"digits_linen: replicas={strategy.num_replicas_in_sync} rows={rows:.0f} "
        f"test_accuracy={correct / rows:.4f}"
    )


if __name__ == "__main__":
    main()
