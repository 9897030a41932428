"""Variables in nested structures: one for each array."""

from __future__ import annotations

from typing import Any

import jax

from .frames import is_variable
from .variable import Variable


def variables(tree: Any, **settings: Any) -> Any:
    """Makes a variable of each array of a nested structure.

    Args:
      tree: The arrays, such as a Flax model's parameters. None stays None.
      **settings: Arguments of every :class:`Variable`, such as ``trainable``; or
        functions of a path that return the argument for the array there.

    Returns:
      The same structure of variables, named by their paths.

    Example:
      >>> import jax.numpy as jnp
      >>> import replicax as rx
      >>> params = rx.variables({"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)})
      >>> params["kernel"]
      <Variable 'kernel' float32[2,3]>
    """

    def make(path: Any, x: Any) -> Variable:
        name = "/".join(str(_key(entry)) for entry in path)
        chosen = {k: f(path) if _chooses(f) else f for k, f in settings.items()}
        return Variable(x, **{"name": name or None, **chosen})

    return jax.tree_util.tree_map_with_path(make, tree)


def read(tree: Any) -> Any:
    """Reads each variable of a nested structure.

    Args:
      tree: A structure that may hold variables, such as :func:`variables` makes.

    Returns:
      The same structure, with ``variable.read_value()`` for each variable.

    Example:
      >>> import replicax as rx
      >>> params = rx.variables({"scale": 2.0})
      >>> float(rx.read(params)["scale"])
      2.0
    """
    return jax.tree.map(
        lambda x: x.read_value() if is_variable(x) else x, tree, is_leaf=is_variable
    )


def _chooses(setting: Any) -> bool:
    return callable(setting) and not isinstance(setting, type)  # such as jnp.float32


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry
