"""Multiplies two matrices on several devices: the first example of distribution.

The host is the master. It cuts ``A [rows, inner]`` into column blocks and
``B [inner, columns]`` into row blocks, one pair for each replica. Every replica
multiplies its pair, and the master adds up the parts:
``A @ B = A_0 @ B_0 + A_1 @ B_1 + ...``

Run it with::

    python examples/matmul.py --devices 4
"""

import argparse

import numpy as np

import replicax as rx


def multiply(a_block, b_block):
    """One replica's share of the work."""
    return a_block @ b_block


def main() -> None:
    """Multiplies on all replicas and checks the product against numpy's."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--devices", type=int, default=4, help="virtual CPU devices")
    args = parser.parse_args()

    rx.set_virtual_devices(args.devices)
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(args.devices)])
    replicas = strategy.num_replicas_in_sync

    inner = 64 * replicas
    rng = np.random.default_rng(0)
    a = rng.normal(size=(100, inner)).astype(np.float32)
    b = rng.normal(size=(inner, 50)).astype(np.float32)

    # Hand each replica its blocks...
    a_blocks, b_blocks = np.split(a, replicas, axis=1), np.split(b, replicas, axis=0)
    blocks = strategy.experimental_distribute_values_from_function(
        lambda context: (
            a_blocks[context.replica_id_in_sync_group],
            b_blocks[context.replica_id_in_sync_group],
        )
    )
    # ...let all of them multiply at once, and add up what comes back.
    parts = strategy.run(multiply, args=blocks)
    product = strategy.reduce("sum", parts)

    print(f"A {a.shape} @ B {b.shape} over {replicas} replicas")
    print(f"each multiplies {a_blocks[0].shape} @ {b_blocks[0].shape}")
    print(f"A @ B = {np.asarray(product)}")
    difference = np.abs(np.asarray(product) - a @ b).max()
    np.testing.assert_allclose(product, a @ b, rtol=1e-4, atol=1e-3)
    print(f"matmul: replicas={replicas} max_abs_diff={difference:.1e}")


if __name__ == "__main__":
    main()
