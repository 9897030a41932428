"""Replicax brings ``tf.distribute`` to JAX."""
