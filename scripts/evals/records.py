"""What one run of an evaluation found, and where finished runs are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run of all questions on one server. Counters are of this run alone."""

    side: str
    """What kept the KV: the name of a `Side`."""
    number: int
    """From 1, in the order of the plan."""
    kind: str
    """"cold", "warm", or what was done to the store before."""
    metric: str
    score: float
    stderr: float
    answers: dict[str, str]
    wall_s: float
    """Of the questions, without the start of the server."""
    server_started_s: float
    """When the process that answered was started, in seconds since 1970."""
    ready_s: float
    """Of the start of the server; 0 where it ran already."""
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    """Out of the server's histogram; None where it shows none."""
    tokens_computed: int
    tokens_device: int
    tokens_region: int
    tokens_disk: int
    bytes_written: int
    bytes_read: int
    disk_used_bytes: int
    disk_budget_bytes: int | None
    """None where the side has no budget."""
    state_changes: int | None
    """Times the disk entered a state other than "growing"; None where the side has no states."""
    rows_corrupt: int | None
    """Rows that failed their checksum; None where the side has none."""
    rows_damaged: int = 0
    """Rows that were given other bytes before this run, on purpose."""

    @property
    def prompt_tokens(self) -> int:
        return self.tokens_computed + self.tokens_device + self.tokens_region + self.tokens_disk


class WrongDirectory(Exception):
    """A directory that holds the runs of another evaluation; the message is one line."""


class Records:
    """The finished runs of one evaluation, a file each, below `directory`.

    `settings` are whatever shapes a run: runs of other settings are never taken for these.
    """

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        """Raises `WrongDirectory`."""
        self.directory = directory
        self._runs = directory / "runs"
        self._runs.mkdir(parents=True, exist_ok=True)
        file = directory / "settings.json"
        if file.exists():
            found = msgspec.json.decode(file.read_bytes())
            differ = sorted(k for k in found | settings if found.get(k) != settings.get(k))
            if differ:
                raise WrongDirectory(
                    f"{directory} holds runs with another {', '.join(differ)}: name another --out"
                )
        else:
            write_whole(file, msgspec.json.format(msgspec.json.encode(settings), indent=2))

    def find(self, side: str, number: int) -> RunRecord | None:
        file = self._file(side, number)
        if not file.exists():
            return None
        try:
            return msgspec.json.decode(file.read_bytes(), type=RunRecord)
        except msgspec.ValidationError as exc:
            raise WrongDirectory(f"{file}: {exc}") from exc

    def save(self, record: RunRecord) -> None:
        encoded = msgspec.json.format(msgspec.json.encode(record), indent=2)
        write_whole(self._file(record.side, record.number), encoded)

    def _file(self, side: str, number: int) -> Path:
        return self._runs / f"{side}-{number}.json"


def write_whole(file: Path, content: bytes) -> None:
    """The file is whole, or it is not there."""
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(file)
