"""Strategies: scope, run, values, collectives.

Everything public is reachable from :mod:`replicax` itself.
"""

# Importing it makes it the strategy that is current outside of any scope.
from .default import DefaultStrategy as DefaultStrategy
