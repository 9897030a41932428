"""Reads handwritten digits, trained on several devices with one replica's step.

A small convolutional network learns scikit-learn's 1,797 images of handwritten digits,
first on several devices under ``MirroredStrategy``, then once more on a single one. At
the end both hold the same parameters.

Run it with::

    python examples/digits.py --devices 4 --epochs 12 --batch-size 96

No accelerator is needed: the devices are virtual ones, made from this machine's CPU.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import Progress
from sklearn.datasets import load_digits

import replicax as rx

# 1. The model. Nothing in it knows of devices or replicas.


class ConvNet(nnx.Module):
    """Three convolutions, two of them striding, and a linear layer on top."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.conv3 = nnx.Conv(32, 64, (3, 3), strides=2, rngs=rngs)
        self.linear = nnx.Linear(2 * 2 * 64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps images ``[batch, 8, 8, 1]`` to logits ``[batch, 10]``."""
        x = nnx.gelu(self.conv1(images))
        x = nnx.gelu(self.conv2(x))
        x = nnx.gelu(self.conv3(x))
        return self.linear(x.reshape(x.shape[0], -1))


# 2. The steps, written for one replica. `batch` is that replica's share of the global
#    batch; the model and the optimizer are the same on all replicas, and stay the same
#    because the gradients are averaged over the replicas before they are used. Leave
#    `all_reduce` out and `run` refuses the step, naming the parameters that would
#    drift apart.


def train_step(model: ConvNet, optimizer: nnx.Optimizer, batch: dict):
    """Takes one step and returns this replica's loss and accuracy."""

    def loss_fn(model):
        logits = model(batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    grads = rx.get_replica_context().all_reduce("mean", grads)
    optimizer.update(model, grads)
    return {"loss": loss, "accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


def eval_step(model: ConvNet, batch: dict):
    """Returns how many of this replica's rows are read correctly, of how many."""
    correct = model(batch["image"]).argmax(-1) == batch["label"]
    return jnp.sum(correct * batch["mask"]), jnp.sum(batch["mask"])


# 3. The data: plain arrays, 1,440 rows to learn from and 357 held out.


def load_data() -> tuple[dict, dict]:
    """Returns the training set and the test set."""
    pixels, labels = load_digits(return_X_y=True)
    data = {
        "image": (pixels.reshape(-1, 8, 8, 1) / 16).astype(np.float32),
        "label": labels.astype(np.int32),
    }
    order = np.random.default_rng(0).permutation(len(data["label"]))
    train, test = order[:1440], order[1440:]
    return (
        {key: rows[train] for key, rows in data.items()},
        {key: rows[test] for key, rows in data.items()},
    )


# 4. Training. The strategy is the only thing that differs between the two runs.


def train(strategy, train_data: dict, args: argparse.Namespace, console: Console):
    """Trains a model under ``strategy`` and returns it."""
    dataset = rx.datasets.from_arrays(train_data).shuffle(seed=0)
    # Batches are global: both runs see the same ones, in the same order.
    dataset = dataset.batch(args.batch_size, drop_remainder=True)
    batches = strategy.experimental_distribute_dataset(dataset)

    with strategy.scope():
        model = ConvNet(nnx.Rngs(0))
        schedule = optax.cosine_decay_schedule(2e-3, args.epochs * len(batches))
        optimizer = nnx.Optimizer(model, optax.adam(schedule), wrt=nnx.Param)

    steps = args.epochs * len(batches)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps)
        for epoch in range(1, args.epochs + 1):
            start = time.perf_counter()
            metrics = []
            for batch in batches:
                per_replica = strategy.run(train_step, args=(model, optimizer, batch))
                metrics.append(strategy.reduce("mean", per_replica))
                progress.advance(task)
            mean = jax.tree.map(lambda *values: np.mean(values), *metrics)
            rate = args.batch_size * len(batches) / (time.perf_counter() - start)
            console.print(
                f"epoch {epoch:2}/{args.epochs}  {rate:7,.0f} images/s  "
                f"loss {mean['loss']:.4f}  accuracy {mean['accuracy']:.4f}"
                + ("  (with compilation)" if epoch == 1 else ""),
                soft_wrap=True,
            )
    return model


# 5. Evaluation over *all* rows. 357 rows divide neither into equal batches nor over
#    four replicas: with remainder="pad" every batch has the same shape and a mask that
#    is 0 for the filler, so that each row counts exactly once.


def evaluate(strategy, model: ConvNet, test_data: dict) -> float:
    """Returns the accuracy over every row of ``test_data``."""
    dataset = rx.datasets.from_arrays(test_data).batch(100)
    options = rx.InputOptions(remainder="pad")
    counts = []
    for batch in strategy.experimental_distribute_dataset(dataset, options):
        per_replica = strategy.run(eval_step, args=(model, batch))
        counts.append(strategy.reduce("sum", per_replica))
    correct, rows = np.sum(counts, axis=0)
    assert rows == len(test_data["label"]), "Every row counts exactly once."
    return float(correct / rows)


def max_abs_difference(model_a: ConvNet, model_b: ConvNet) -> float:
    """Returns the largest difference between two models' parameters."""
    leaves = zip(
        jax.tree.leaves(nnx.state(model_a, nnx.Param)),
        jax.tree.leaves(nnx.state(model_b, nnx.Param)),
        strict=True,
    )
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in leaves)


def main() -> None:
    """Trains on several devices and on one, and compares."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices")
    parser.add_argument("--epochs", type=int, default=12, help="at least 1")
    parser.add_argument("--batch-size", type=int, default=96, help="over all devices")
    args = parser.parse_args()

    # Before anything else touches a device.
    rx.set_virtual_devices(args.devices)
    console = Console(highlight=False)
    train_data, test_data = load_data()

    mirrored = rx.MirroredStrategy([f"cpu:{i}" for i in range(args.devices)])
    console.print(f"{mirrored.num_replicas_in_sync} replicas")
    model = train(mirrored, train_data, args, console)
    accuracy = evaluate(mirrored, model, test_data)
    console.print(f"test accuracy {accuracy:.4f} over {len(test_data['label'])} images")

    console.print("the same training on one device")
    single = rx.OneDeviceStrategy("cpu:0")
    single_model = train(single, train_data, args, console)

    difference = max_abs_difference(model, single_model)
    print(
        f"demo: replicas={mirrored.num_replicas_in_sync} test_accuracy={accuracy:.4f} "
        f"single_device_max_abs_diff={difference:.1e}"
    )


if __name__ == "__main__":
    main()
