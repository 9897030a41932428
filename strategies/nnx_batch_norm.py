"""Batch normalisation for Flax nnx that knows of the replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import batch_norm
from .batch_norm import Statistics
from .batch_statistics import Moments


class BatchNorm(nnx.BatchNorm):
    """``flax.nnx.BatchNorm`` with a switch for what replicas share.

    Whatever the switch says, there is one set of running averages, the same on all
    replicas, so that evaluation does not depend on how many there are:

    * ``"averaged"``, as in TF: each replica normalises with its own rows, and the
      replicas' running averages are averaged. ``run`` does so when it writes them back,
      in one all-reduce for the whole model.
    * ``"local"``, as in PyTorch: each replica normalises with its own rows, and the
      running averages are those of replica 0.
    * ``"synchronized"``: all normalise with the rows of the whole global batch, at the
      cost of an all-reduce for each layer, and another one for its gradient.

    Rows that a mask leaves out count nowhere, and where no row counts, the running
    averages stay as they are and stand in for the batch's.

    Args:
      num_features: The number of input features.
      statistics: ``"averaged"``, ``"local"`` or ``"synchronized"``.
      **options: The other arguments of ``flax.nnx.BatchNorm``, except ``axis_name`` and
        ``axis_index_groups``. ``use_fast_variance=False`` costs a second all-reduce
        when synchronized, and is exact also where the running mean is far off.

    Raises:
      ValueError: ``statistics`` is unknown, or an axis is named.

    Example:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> norm = rx.BatchNorm(
      ...     1, momentum=0.0, statistics="synchronized", rngs=nnx.Rngs(0))
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> rows = rx.PerReplica([jnp.zeros((2, 1)), jnp.full((2, 1), 10.0)])
      >>> y = strategy.run(lambda norm, x: norm(x), (norm, rows))
      >>> float(norm.mean[0]), float(norm.var[0])
      (5.0, 25.0)
    """

    def __init__(
        self, num_features: int, *, statistics: Statistics = "averaged", **options: Any
    ):
        super().__init__(num_features, **options)
        batch_norm.check_options(statistics, self.axis_name, self.axis_index_groups)
        self.statistics: Statistics = statistics

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises one replica's batch.

        All replicas must call it, unless the running averages are used.

        Args:
          x: The batch.
          use_running_average: Whether to use the running averages and leave them alone.
            None leaves it to the constructor, ``train()`` and ``eval()``.
          mask: Booleans of as many dimensions as ``x`` that broadcast to it: what
            counts in the statistics. All of ``x`` is normalised.

        Returns:
          The result, in the shape of ``x``.

        Raises:
          ValueError: The mask has another number of dimensions than ``x``.
        """
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average or use_running_average is None:  # None: Flax refuses it
            return super().__call__(x, use_running_average)
        running = Moments(self.mean[...], self.var[...])
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, _, _, scale, bias = self.promote_dtype(
            (x, *running, scale, bias), dtype=self.dtype
        )
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        axes = batch_norm.reduction_axes(x, self.axis)
        moments = batch_norm.moments_of(
            wide, axes, running, mask, self.statistics, self.use_fast_variance
        )
        running = running.toward(moments, self.momentum)
        if self.statistics == "local":
            running = batch_norm.shared(running, self.statistics)
        self.mean[...], self.var[...] = running
        y = batch_norm.normalize(wide, axes, moments, scale, bias, self.epsilon)
        return y.astype(x.dtype)
