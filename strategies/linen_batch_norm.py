"""Batch normalisation for Flax linen that knows of the replicas."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import canonicalize_dtype

from . import batch_norm
from .batch_norm import Statistics
from .batch_statistics import Moments


class LinenBatchNorm(nn.BatchNorm):
    """``flax.linen.BatchNorm`` with a switch for what replicas share.

    The switch is that of :class:`replicax.BatchNorm`. The new ``batch_stats`` are the
    same on all replicas whatever it says: with ``"averaged"`` and ``"local"`` the layer
    sees to it by an all-reduce that XLA joins with those of other layers and of the
    gradients.

    Args:
      statistics: ``"averaged"``, ``"local"`` or ``"synchronized"``. All other arguments
        are those of ``flax.linen.BatchNorm``, except ``axis_name`` and
        ``axis_index_groups``.

    Raises:
      ValueError: ``statistics`` is unknown, or an axis is named.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> norm = rx.LinenBatchNorm(
      ...     use_running_average=False, momentum=0.0, statistics="synchronized")
      >>> variables = norm.init(jax.random.key(0), jnp.zeros((2, 1)))
      >>> def step(variables, x):
      ...     y, new = norm.apply(variables, x, mutable=["batch_stats"])
      ...     return y, new["batch_stats"]
      >>> strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> rows = rx.PerReplica([jnp.zeros((2, 1)), jnp.full((2, 1), 10.0)])
      >>> y, stats = strategy.run(step, (variables, rows))
      >>> float(stats["mean"][0]), float(stats["var"][0])
      (5.0, 25.0)
    """

    statistics: Statistics = "averaged"

    def __post_init__(self) -> None:
        batch_norm.check_options(
            self.statistics, self.axis_name, self.axis_index_groups
        )
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        """Normalises one replica's batch.

        All replicas must call it, unless the running averages are used. While the
        parameters are initialised, the running averages are left alone and nothing is
        communicated.

        Args:
          x: The batch.
          use_running_average: Whether to use ``batch_stats`` and leave them alone. Give
            it here or to the constructor.
          mask: Booleans of as many dimensions as ``x`` that broadcast to it: what
            counts in the statistics. All of ``x`` is normalised.

        Returns:
          The result, in the shape of ``x``.

        Raises:
          ValueError: The mask has another number of dimensions than ``x``.
        """
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        axes = batch_norm.reduction_axes(x, self.axis)
        shape = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
        kept = jnp.float32 if self.force_float32_reductions else self.param_dtype
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, kept)
        var = self.variable("batch_stats", "var", jnp.ones, shape, kept)
        scale = self._param("scale", self.scale_init, shape) if self.use_scale else None
        bias = self._param("bias", self.bias_init, shape) if self.use_bias else None

        result_dtype = canonicalize_dtype(x, scale, bias, dtype=self.dtype)
        dtype = self.dtype or x.dtype
        if self.force_float32_reductions:
            dtype = jnp.promote_types(dtype, jnp.float32)
        x = x.astype(dtype)
        moments = running = Moments(mean.value, var.value)
        if not use_running_average:
            moments = batch_norm.moments_of(
                x, axes, running, mask, self._whose(), self.use_fast_variance
            )
            if not self.is_initializing():
                running = running.toward(moments, self.momentum)
                mean.value, var.value = batch_norm.shared(running, self.statistics)
        y = batch_norm.normalize(x, axes, moments, scale, bias, self.epsilon)
        return y.astype(result_dtype)

    def _param(self, name: str, init: Any, shape: tuple[int, ...]) -> jax.Array:
        return self.param(name, init, shape, self.param_dtype)

    def _whose(self) -> Statistics:
        return "local" if self.is_initializing() else self.statistics
