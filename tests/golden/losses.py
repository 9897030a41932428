"""TF's answers for ``compute_average_loss`` and ``scale_regularization_loss``."""

import jax.numpy as jnp

import replicax as rx

from .table import Each, Raises, mirrored, not_applicable, same, values

LOSSES = [[1.0, 2.0], [3.0, 4.0]]


def average(**how):
    step = lambda losses: rx.compute_average_loss(losses, **how)  # noqa: E731
    return mirrored(2).run(step, (values(*LOSSES),))


def in_scope(call, *args):
    with mirrored(2).scope():
        return call(*args)


CASES = [
    same(
        "avg_loss_global_batch",
        Each(0.375, 0.875),
        lambda: average(global_batch_size=8),
    ),
    same(
        "avg_loss_weights",
        Each(0.25, 0.75),
        lambda: average(sample_weight=jnp.float32([1.0, 0.0])),
    ),
    same(
        "avg_loss_cross_error",
        Raises("RuntimeError"),
        lambda: in_scope(rx.compute_average_loss, [1.0, 2.0]),
    ),
    same(
        "avg_loss_no_strategy",
        3.0,
        lambda: rx.compute_average_loss([1.0, 2.0, 6.0]),
    ),
    same(
        "avg_loss_scalar_error",
        Raises("ValueError"),
        lambda: rx.compute_average_loss(1.0),
    ),
    same(
        "scale_reg_loss",
        Each(1.5, 1.5),
        lambda: mirrored(2).run(rx.scale_regularization_loss, (3.0,)),
    ),
    same(
        "scale_reg_loss_cross_error",
        Raises("RuntimeError"),
        lambda: in_scope(rx.scale_regularization_loss, 3.0),
    ),
    same("scale_reg_loss_none", 3.0, lambda: rx.scale_regularization_loss(3.0)),
    not_applicable(
        "get_loss_reduction",
        "SUM",
        "It tells Estimators of TF 1 how a loss is combined; here the step says so.",
    ),
]
