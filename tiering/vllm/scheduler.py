"""vLLM's scheduler of offloading, kept from two things that it does wrong with windows."""

from __future__ import annotations

from itertools import chain
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec


class WindowScheduler(OffloadingConnectorScheduler):  # type: ignore[misc]
    """Asks for no more of a window than is kept, and stores whole chunks or none."""

    config: Any  # vLLM's `SchedulerOffloadConfig`

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        groups = tuple(_with_kept_window(group) for group in self.config.kv_group_configs)
        self.config = self.config._replace(kv_group_configs=groups)
        self._leaves_gaps = [
            position
            for position, group in enumerate(groups)
            if has_window(group.kv_cache_spec) and self.config.blocks_per_chunk > 1
        ]

    def _update_req_states(self, scheduler_output: Any) -> None:
        """Comes in each step before vLLM chooses what to store.

        A block that the window has left is 0, and vLLM stores the others of its chunk under the
        name of the whole one, packed: a request that needs all of the chunk would be given whatever
        stood there before.  A chunk whose last block is 0, vLLM leaves out.
        """
        super()._update_req_states(scheduler_output)
        if not self._leaves_gaps:
            return
        size = self.config.blocks_per_chunk
        scheduled = scheduler_output.num_scheduled_tokens
        finished = scheduler_output.finished_req_ids or ()
        for request_id in chain(scheduled, finished):
            request = self._req_status.get(request_id)
            for position in self._leaves_gaps if request is not None else ():
                state = request.group_states[position]
                blocks = state.block_ids
                # Of one that has finished vLLM goes through earlier chunks again.
                first = 0 if request_id in finished else state.next_stored_chunk_idx
                for end in range((first + 1) * size, len(blocks) + 1, size):
                    if 0 in blocks[end - size : end]:
                        blocks[end - 1] = 0


def has_window(kv_cache_spec: Any) -> bool:
    """Whether a request gives blocks of such a KV-cache group back before it ends."""
    return isinstance(kv_cache_spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)


def _with_kept_window(group: Any) -> Any:
    """A token attends to `window - 1` tokens before it, and vLLM keeps the blocks of so many; but
    to load a prefix it asks for chunks of `window` tokens.  Of a window of whole chunks and one
    token, as Cohere's models have, that is a chunk more than anybody stored: never a hit."""
    spec = group.kv_cache_spec
    if not isinstance(spec, SlidingWindowSpec):
        return group
    kept_tokens = spec.sliding_window - 1 + spec.extra_retained_tokens
    chunks = max(1, -(-kept_tokens // group.tokens_per_chunk))
    return group._replace(sliding_window_size_in_chunks=chunks)
