"""What XLA made of a step that uses variables, for tests that look into it."""

import re

from replicax.strategies.function_key import function_key

_COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)


def compiled_step(strategy, step, *args):
    """Runs a step of arrays once, and returns its compiled program."""
    strategy.run(step, args)
    (program,) = [
        call.repeatable_program
        for key, call in strategy._runner._calls.items()
        if key[0] == function_key(step) and call.repeatable_program
    ]
    variables = program.variables
    arrays = [
        [v.layout.enter(v.array) for v in held]
        for held in (variables.read, variables.written)
    ]
    lowered = program.donating.lower(*(arrays if variables else ()), *args)
    return lowered.compile()


def collectives_of(compiled):
    """The kinds of the collectives in a compiled program, sorted."""
    return sorted(_COLLECTIVE.findall(compiled.as_text()))
