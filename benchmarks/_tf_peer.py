"""TensorFlow's side of ``train_mlp.py``, a process of its own (see ``_peer.py``).

It is run by the interpreter that has TensorFlow, and needs nothing else.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from _peer import serve, timed_loop

LAYERS = (784, 512, 512, 10)
LEARNING_RATE = 1e-4


def start(devices: int):
    """Imports TensorFlow with virtual CPU devices; returns it and a strategy."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    virtual = [tf.config.LogicalDeviceConfiguration() for _ in range(devices)]
    tf.config.set_logical_device_configuration(cpu, virtual)
    names = [f"CPU:{index}" for index in range(devices)]
    return tf, tf.distribute.MirroredStrategy(names)


def per_replica(strategy, tensors):
    """A tuple of global arrays, a slice of the rows of each on every replica."""
    replicas = strategy.num_replicas_in_sync

    def rows_of(context):
        r = context.replica_id_in_sync_group
        return tuple(x.reshape(replicas, -1, *x.shape[1:])[r] for x in tensors)

    return strategy.experimental_distribute_values_from_function(rows_of)


def thousand_floats(tf, strategy, rows: int) -> Callable[[int], float]:
    """Plain SGD on 1,000 floats under ``tf.function``.

    Written with ``merge_call`` and ``extended``: a Keras optimizer would take longer.
    """
    import numpy as np

    with strategy.scope():
        w = tf.Variable(tf.zeros(1000))
    x = np.random.default_rng(0).normal(size=(rows, 1000)).astype(np.float32)
    (x,) = per_replica(strategy, (x,))

    def update(strategy, gradient):
        mean = tf.distribute.ReduceOp.MEAN
        gradient = strategy.extended.reduce_to(mean, gradient, destinations=w)
        strategy.extended.update(
            w, lambda w, gradient: w.assign_sub(0.1 * gradient), args=(gradient,)
        )

    def replica_step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x - w))
        context = tf.distribute.get_replica_context()
        context.merge_call(update, args=(tape.gradient(loss, w),))
        return loss

    @tf.function
    def step(x):
        return strategy.run(replica_step, (x,))

    return timed_loop(lambda: step(x))


def classification_batch(rows: int):
    """Random examples and labels, as in ``_problems``."""
    import numpy as np

    random = np.random.default_rng(0)
    image = random.normal(size=(rows, LAYERS[0])).astype(np.float32)
    return image, random.integers(0, 10, size=rows).astype(np.int32)


def perceptron(tf):
    """The Keras model of 784-512-512-10, and Adam for it."""
    *hidden, last = LAYERS[1:]
    layers = [tf.keras.layers.Dense(n, "relu") for n in hidden]
    model = tf.keras.Sequential(
        [tf.keras.Input(LAYERS[:1]), *layers, tf.keras.layers.Dense(last)]
    )
    return model, tf.keras.optimizers.Adam(LEARNING_RATE)


def mlp(tf, strategy, rows: int) -> Callable[[int], float]:
    """The perceptron in a custom training loop under ``tf.function``."""
    replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        model, optimizer = perceptron(tf)
        optimizer.build(model.trainable_variables)
    image, label = per_replica(strategy, classification_batch(rows))

    def replica_step(image, label):
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                label, model(image, training=True)
            )
            loss = tf.reduce_mean(losses) / replicas
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function
    def step(image, label):
        return strategy.run(replica_step, (image, label))

    return timed_loop(lambda: step(image, label))


def keras_fit(tf, strategy, rows: int) -> Callable[[int], float]:
    """The perceptron under ``Model.fit``, its start and end left out of the time."""
    with strategy.scope():
        model, optimizer = perceptron(tf)
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
    image, label = classification_batch(rows)
    data = tf.data.Dataset.from_tensors((image, label)).cache().repeat()

    class Clock(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                self.begin = time.perf_counter()

        def on_train_batch_end(self, batch, logs=None):
            self.end = time.perf_counter()

    def run(steps: int) -> float:
        clock = Clock()
        model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[clock])
        return clock.end - clock.begin

    return run


def prepare(devices: int, rows: int):
    """TensorFlow's versions and workloads."""
    tf, strategy = start(devices)
    workloads = {
        "sgd": thousand_floats(tf, strategy, devices),
        "mlp": mlp(tf, strategy, rows),
        "fit": keras_fit(tf, strategy, rows),
    }
    return {"tensorflow": tf.__version__, "keras": tf.keras.__version__}, workloads


if __name__ == "__main__":
    serve(lambda: prepare(*map(int, sys.argv[1:])))
