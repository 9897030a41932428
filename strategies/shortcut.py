"""The short way of a call that is made again and again.

In a training loop, each call is the one before it with other arrays. Such a call needs
no key to find its program, and JAX looks at its arguments anyway: whether it knows
their structure, shapes and places, and whether the same mesh is set. So all that is
left to do is to see that it *is* the call before it. Every line of the functions made
here is on the path of every step, which is why they call little and look nothing up.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replicax._compat import no_trace_is_active, num_signatures

from .context import stands_outside
from .donation import consumed, holds_deleted
from .fence import LAUNCHING
from .function_key import captured_cells, captured_globals
from .program import NotRepeated, Program
from .traced_step import WithState, finish

if TYPE_CHECKING:
    from .options import RunOptions
    from .strategy import Strategy

NOT_REPEATED = object()
"""Says that a call was no repetition after all."""


def make_shortcut(  # noqa: C901 - in one piece, because a call costs time
    strategy: Strategy, fn: Any, options: RunOptions | None, program: Program
) -> Callable[..., Any]:
    """Returns a function that makes the same call again.

    Args:
      strategy: The strategy.
      fn: The step.
      options: The options object of the call.
      program: Its program, which takes arrays only.

    Returns:
      A function of the arguments of ``Strategy.run``. It returns what the step returns;
      or ``NOT_REPEATED``, having done nothing, if this is another call after all.
    """
    cells = captured_cells(fn)
    named = [g for g in captured_globals(fn) if g[1] in g[0]]
    is_function = isinstance(fn, types.FunctionType)
    defaults = fn.__defaults__ if is_function else None
    kwdefaults = fn.__kwdefaults__ if is_function else None
    call, donor = program.donating, program.donor
    launch = program.variables.launcher(call)
    fence = strategy.fence
    launches, between_waits = fence.launches, fence.between_waits

    def run(  # noqa: C901
        fn_: Any, args: Any, kwargs: Any, options_: Any
    ) -> Any:
        if (
            fn_ is not fn
            or options_ is not options
            or type(args) is not tuple
            or not program.is_repeatable
            or not stands_outside(strategy)
            or not no_trace_is_active()
            or (is_function and fn.__defaults__ is not defaults)
            or (is_function and fn.__kwdefaults__ is not kwdefaults)
        ):
            return NOT_REPEATED
        try:
            for cell, contents in cells:
                if cell.cell_contents is not contents:
                    return NOT_REPEATED
        except ValueError:  # a name without a value yet
            return NOT_REPEATED
        for namespace, name, value in named:
            if namespace.get(name) is not value:
                return NOT_REPEATED
        if fence.is_closed:
            fence.pass_gate()
        with LAUNCHING:  # the arguments must not be donated by another thread meanwhile
            born: Any = None
            if donor is not None:
                taken = donor.take(args, kwargs)
                if taken is None:
                    return NOT_REPEATED
                (args, born), kwargs = taken, None
            elif consumed.any and holds_deleted((args, kwargs)):
                return NOT_REPEATED
            try:
                result = launch(*args, **kwargs) if kwargs else launch(*args)
            except (NotRepeated, ValueError, TypeError) as error:
                if donor is not None:
                    donor.give_back(args, born)
                program.reconsider(error, args, kwargs or {})
                return NOT_REPEATED
        if num_signatures(call) != program.num_signatures:
            program.look_closer(args, kwargs or {})
        if donor is not None:
            donor.own(result)
        if next(launches) % between_waits == 0:
            fence.wait(result)
        return finish(result)[0] if type(result) is WithState else result

    return run
