"""What a function that makes a dataset is told about the pipeline that it makes."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The place of one input pipeline among those of all workers.

    Passed to the function given to ``strategy.distribute_datasets_from_function``.

    Args:
      num_input_pipelines: How many pipelines feed the replicas: one a worker.
      input_pipeline_id: Which of them this is, from 0.
      num_replicas_in_sync: The replicas of all workers.

    Raises:
      ValueError: A number is out of range.

    Example:
      >>> import replicax as rx
      >>> context = rx.InputContext(num_replicas_in_sync=4)
      >>> context.get_per_replica_batch_size(64)
      16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if self.num_input_pipelines < 1 or self.num_replicas_in_sync < 1:
            raise ValueError(
                f"There must be at least one pipeline and one replica. Got {self!r}."
            )
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            raise ValueError(
                f"input_pipeline_id must be from 0 to {self.num_input_pipelines - 1}. "
                f"Got {self.input_pipeline_id}."
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the rows that each replica gets of a global batch.

        Args:
          global_batch_size: The rows of a batch of all replicas together.

        Returns:
          ``global_batch_size / num_replicas_in_sync``.

        Raises:
          ValueError: It is not a whole number.
        """
        each, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                f"The global batch size {global_batch_size} cannot be divided evenly "
                f"over {self.num_replicas_in_sync} replicas (remainder {rest}). The "
                "next larger size that can is "
                f"{global_batch_size - rest + self.num_replicas_in_sync}."
            )
        return each

    def __str__(self) -> str:
        return (
            f"InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


def contexts_of_replicas(worker: InputContext) -> list[InputContext]:
    """The contexts of pipelines that are made for one replica each.

    Args:
      worker: The context of the worker that the replicas belong to.

    Returns:
      One context for each of the worker's replicas.
    """
    total = worker.num_replicas_in_sync
    here = total // worker.num_input_pipelines
    first = worker.input_pipeline_id * here
    return [InputContext(total, first + r, total) for r in range(here)]
