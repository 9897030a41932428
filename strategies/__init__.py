"""Strategies: scope, run, values, collectives.

Everything public is reachable from :mod:`replicax` itself.
"""
