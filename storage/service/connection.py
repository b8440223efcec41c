"""Connection: an engine's end of the socket to its store process.  Frames go out, replies come in.

Nothing waits but `wait`.  One thread.  `OSError` and `EOFError` mean that the other end is gone.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

from storage.service import messages
from storage.service.messages import Attach, FrameSplitter, Reply, Request

_RECEIVE_BYTES = 1 << 18  # at once, so that the index of a store that came back holds no step up


class Connection:
    """Owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._readable = select.epoll(1)
        self._readable.register(end, select.EPOLLIN)
        self._splitter = FrameSplitter()
        self._unsent = bytearray()
        self._received = memoryview(bytearray(_RECEIVE_BYTES))

    # -- saying ---------------------------------------------------------------------------------

    @property
    def unsent_bytes(self) -> int:
        """Of messages that wait for the store process to take them."""
        return len(self._unsent)

    def attach(self, message: Attach, region_fd: int) -> None:
        """The first message, and the region with it.  Raises `OSError`."""
        frame = messages.encode_frame([message])
        sent = socket.send_fds(self._socket, [frame], [region_fd])
        self._unsent += frame[sent:]

    def put(self, request: Request) -> None:
        """To be sent with all that was put before it."""
        self._unsent += messages.encode_frame([request])

    def send(self) -> None:
        """As much of what is unsent as the store process takes now.  Raises `OSError`."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]

    def hang_up(self) -> None:
        """Say nothing more; what is unsent is lost."""
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    # -- hearing --------------------------------------------------------------------------------

    def has_something(self) -> bool:
        """Whether `receive` would bring something, or find that the other end is gone."""
        return bool(self._readable.poll(0))

    def wait(self, timeout_s: float) -> None:
        """Until there is something to hear, or room for what is unsent."""
        select.select([self._socket], [self._socket] if self._unsent else [], [], timeout_s)

    def receive(self) -> int:
        """Bytes that have come, at most `_RECEIVE_BYTES`; `replies` are what they hold.

        0 if nothing has come.  Raises `OSError`, or `EOFError` at the end.
        """
        try:
            size = self._socket.recv_into(self._received)
        except BlockingIOError:
            return 0
        if not size:
            raise EOFError
        return size

    def replies(self, size: int) -> Iterator[Reply]:
        """In the `size` bytes that were received last.  Raises `ValueError` or `MsgspecError` on
        nonsense."""
        for body in self._splitter.feed(self._received[:size]):
            yield from messages.reply_decoder.decode(body)

    def close(self) -> None:
        self._readable.close()
        self._socket.close()
