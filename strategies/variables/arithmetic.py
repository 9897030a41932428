"""Operators on variables: each works on the value, and returns an array."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..fence import LAUNCHING


def _unary(operate: Callable[[Any], Any]) -> Any:
    def method(self: Any) -> Any:
        with LAUNCHING:  # nobody must donate the array meanwhile
            return operate(self.for_operator())

    return method


def _binary(operate: Callable[[Any, Any], Any]) -> Any:
    def method(self: Any, other: Any) -> Any:
        with LAUNCHING:
            return operate(self.for_operator(), _operand(other))

    return method


def _reflected(operate: Callable[[Any, Any], Any]) -> Any:
    def method(self: Any, other: Any) -> Any:
        with LAUNCHING:
            return operate(_operand(other), self.for_operator())

    return method


def _operand(x: Any) -> Any:
    return x.for_operator() if isinstance(x, ArrayOperators) else x


class ArrayOperators:
    """Lets an object stand for the array that :meth:`for_operator` returns.

    ``==`` and ``!=`` compare element by element, as an array does; ``hash`` goes by
    identity, so that variables can be keys.
    """

    __array_priority__ = 200  # numpy leaves binary operators to us

    def for_operator(self) -> Any:
        """The array."""
        raise NotImplementedError

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__ = _binary(operator.truediv)
    __rtruediv__ = _reflected(operator.truediv)
    __floordiv__ = _binary(operator.floordiv)
    __rfloordiv__ = _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __matmul__ = _binary(operator.matmul)
    __rmatmul__ = _reflected(operator.matmul)
    __and__, __rand__ = _binary(operator.and_), _reflected(operator.and_)
    __or__, __ror__ = _binary(operator.or_), _reflected(operator.or_)
    __xor__, __rxor__ = _binary(operator.xor), _reflected(operator.xor)
    __lshift__, __rlshift__ = _binary(operator.lshift), _reflected(operator.lshift)
    __rshift__, __rrshift__ = _binary(operator.rshift), _reflected(operator.rshift)
    __divmod__, __rdivmod__ = _binary(divmod), _reflected(divmod)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)
    __hash__ = object.__hash__
    __neg__, __pos__ = _unary(operator.neg), _unary(lambda x: x + 0)
    __abs__, __invert__ = _unary(operator.abs), _unary(operator.invert)
    __float__, __int__, __bool__ = _unary(float), _unary(int), _unary(bool)
    __complex__, __index__ = _unary(complex), _unary(operator.index)
    __len__ = _unary(len)

    def __round__(self, ndigits: int | None = None) -> Any:
        with LAUNCHING:
            return round(self.for_operator(), ndigits)

    def __getitem__(self, index: Any) -> Any:
        with LAUNCHING:
            return jnp.copy(self.for_operator()[index])

    def __iter__(self) -> Iterator[Any]:
        return iter(self[...])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        with LAUNCHING:
            return np.array(self.for_operator(), dtype=dtype)

    def __format__(self, spec: str) -> str:
        return format(np.asarray(self), spec) if spec else str(self)
