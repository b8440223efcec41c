"""Which rows are worth a write.  Pure bookkeeping: no bytes, files, clocks or locks.

While the disk has room every row is.  Once rows are evicted for new ones, a write pays only if its
row is read before it goes again.  Two rules are known to win, each on its own kind of traffic:
admitting always, where a row comes back before the disk has turned over, and admitting at second
touch, where most rows never come back and the few that do must be kept from the flood.

Which of them holds is learned (`LearnedAdmission`), by playing the rules against each other on a
sample of the traffic that the store sees anyway: per rule, a shadow keeps the names that a disk
under this rule would hold, and counts what it would have hit and written.  The rule whose shadow
did best lately decides.  Nothing is fitted to a time: turnover, reuse and scans all end up in the
shadows' hits.

Chains: chunks are offered first to last, and behind the first that is declined all are, because a
chunk whose prefix is not there can't be hit.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

DIGEST_BITS = 64


def digest_of(key: bytes) -> int:
    """What is remembered of a key: 64 bits, evenly spread whatever the key looks like."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=DIGEST_BITS // 8).digest(), "little")


class AdmissionPolicy(Protocol):
    """Decides for one namespace.  The caller serialises calls.

    A *sighting* of a key is one use of its chunk by one request.  Every sighting is told once: by
    `read` if the disk had the row, by `offer` if it had to be computed.  Keys are those of one
    request, first to last.
    """

    def read(self, keys: Sequence[bytes], *, slots: int) -> None:
        """Rows of these names were read from the disk, which has `slots` slots."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """Chunks that stand on the disk were used from somewhere else; not a sighting."""
        ...

    def offer(self, keys: Sequence[bytes], *, slots: int, free: int) -> int:
        """How many of these rows to write, from the first.  Those that are stored already are no
        decision, but count as sightings.  Of `slots` slots `free` are free or can be had without
        evicting: at least so many rows are admitted."""
        ...


# -- what was seen ------------------------------------------------------------------------------

GHOST_GENERATIONS = 5  # sightings are remembered for at least four turnovers of the disk
_BITS_PER_KEY = 16  # with four bits set: about one unseen key in 40 looks seen
_WORD_BITS = 64
_MIN_WORDS = 16
NEVER = GHOST_GENERATIONS


class _Generation:
    """A Bloom filter of one word per key, for as many keys as there are slots."""

    def __init__(self, slots: int) -> None:
        self.room = max(slots, 1)
        self.words = array("Q", [0]) * max(_MIN_WORDS, slots * _BITS_PER_KEY // _WORD_BITS)


class Ghost:
    """Names seen lately, on the disk or not, by age in turnovers of the disk.

    A generation ends when it has taken in as many names as the disk has slots, so ages follow a
    disk that grows.  `GHOST_GENERATIONS` of 2 bytes a slot: 10 bytes a slot in all.
    """

    def __init__(self) -> None:
        self._generations: deque[_Generation] = deque(maxlen=GHOST_GENERATIONS)

    @property
    def size_bytes(self) -> int:
        return sum(g.words.itemsize * len(g.words) for g in self._generations)

    def see(self, digest: int, slots: int) -> int:
        """Note a sighting; how many generations ago the last one was, or `NEVER`."""
        word, mask = digest >> 24, _mask(digest)
        age = NEVER
        for number, generation in enumerate(self._generations):
            words = generation.words
            if words[word % len(words)] & mask == mask:
                age = number
                break
        if age:
            if not self._generations or not self._generations[0].room:
                self._generations.appendleft(_Generation(slots))
            newest = self._generations[0]
            newest.words[word % len(newest.words)] |= mask
            newest.room -= 1
        return age


def _mask(digest: int) -> int:
    """Four of the 64 bits of a word, by the low 24 bits of a digest."""
    return (
        1 << (digest & 63)
        | 1 << (digest >> 6 & 63)
        | 1 << (digest >> 12 & 63)
        | 1 << (digest >> 18 & 63)
    )


# -- rules --------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """Admit what was seen at most `age_max` generations ago, and one offer in `sparse` (0: none)
    whatever it holds."""

    name: str
    age_max: int
    sparse: int = 0

    def admits(self, age: int, draw: int) -> bool:
        """`draw` is a random number of the offer's: half a chain is of no use."""
        return age <= self.age_max or (self.sparse > 0 and draw % self.sparse == 0)


ALWAYS = Rule("always", NEVER)
SECOND_TOUCH = Rule("second-touch", GHOST_GENERATIONS - 1)
# For rows that come back later than a disk that takes them all can keep them, such as a loop over
# more than fits: hold on to what is there, and renew a little of it at a time.
RELUCTANT = Rule("reluctant", 0, sparse=16)


class RuleAdmission:
    """One rule for ever."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._ghost = Ghost()
        self._draws = _Draws()

    def read(self, keys: Sequence[bytes], *, slots: int) -> None:
        for key in keys:
            self._ghost.see(digest_of(key), slots)

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def offer(self, keys: Sequence[bytes], *, slots: int, free: int) -> int:
        ages = [self._ghost.see(digest_of(key), slots) for key in keys]
        return _decide(self.rule, ages, self._draws.next(), free)


def _decide(rule: Rule, ages: Sequence[int], draw: int, free: int) -> int:
    """The first `free` rows, and from there as `rule` says, up to the first that it declines."""
    count = min(free, len(ages))
    while count < len(ages) and rule.admits(ages[count], draw):
        count += 1
    return count


class _Draws:
    """Numbers without a pattern, the same in every run (splitmix64)."""

    def __init__(self) -> None:
        self._state = 0

    def next(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & (1 << 64) - 1
        mixed = (self._state ^ self._state >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
        return mixed ^ mixed >> 31


# -- learning which rule holds ------------------------------------------------------------------

_SHADOW_SLOTS = 4096  # of each shadow at most: errs by about 1 % of the hit rate, takes 0.5 MB
_HALF_LIFE = 8  # of a sighting's weight, in turnovers of sightings: slower than a rule shows,
# faster than the traffic of a day changes
_PATIENCE = 1  # turnovers of sightings on a full disk before any rule has shown what it does
_WRITE_COST = 1 / 64  # of a hit: what it is worth not to wear the drive; decides between equals


class Shadow:
    """The sampled names that a disk under `rule` would hold, leaf first, and how it did lately."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.hits = 0.0
        self.writes = 0.0
        self._order: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def score(self) -> float:
        return self.hits - _WRITE_COST * self.writes

    def touch(self, digests: Sequence[int]) -> None:
        for digest in reversed(digests):
            if digest in self._order:
                self._order.move_to_end(digest)

    def sight(
        self, digests: Sequence[int], ages: Sequence[int], draw: int, slots: int, free: int
    ) -> tuple[int, int]:
        """(hits, writes) of these sightings on a disk of `slots`, all of it sampled."""
        order = self._order
        hits = 0
        while hits < len(digests) and digests[hits] in order:
            hits += 1
        free = max(free, slots - len(order))
        new = [i for i, digest in enumerate(digests) if digest not in order]
        count = _decide(self.rule, [ages[i] for i in new], draw, free)
        written = {digests[i] for i in new[:count]}
        for digest in reversed(digests):
            if digest in order:
                order.move_to_end(digest)
            elif digest in written:
                order[digest] = None
        while len(order) > slots:
            order.popitem(last=False)
        return hits, len(written)

    def thin_out(self, sample_mask: int) -> None:
        """Keep the names of a coarser sample."""
        self._order = OrderedDict((d, None) for d in self._order if not d & sample_mask)


class LearnedAdmission:
    """Whichever of `rules` does best on the traffic as it is; the first one until that is known."""

    def __init__(self, rules: Sequence[Rule] = (ALWAYS, SECOND_TOUCH, RELUCTANT)) -> None:
        self._ghost = Ghost()
        self._draws = _Draws()
        self.shadows = [Shadow(rule) for rule in rules]
        self._best = self.shadows[0]
        self._evidence = 0  # sampled sightings on a full disk
        self._sample_bits = 0  # one name in 2 ** this is sampled

    @property
    def rule(self) -> Rule:
        """The one that decides now."""
        return self._best.rule

    def read(self, keys: Sequence[bytes], *, slots: int) -> None:
        self._sight(keys, slots, 0)

    def touch(self, keys: Sequence[bytes]) -> None:
        digests = [d for d in map(digest_of, keys) if not d & self._sample_mask]
        for shadow in self.shadows:
            shadow.touch(digests)

    def offer(self, keys: Sequence[bytes], *, slots: int, free: int) -> int:
        ages, draw = self._sight(keys, slots, free)
        return _decide(self.rule, ages, draw, free)

    @property
    def _sample_mask(self) -> int:
        return (1 << self._sample_bits) - 1

    def _sight(self, keys: Sequence[bytes], slots: int, free: int) -> tuple[list[int], int]:
        digests = [digest_of(key) for key in keys]
        ages = [self._ghost.see(digest, slots) for digest in digests]
        draw = self._draws.next()
        while slots >> self._sample_bits > _SHADOW_SLOTS:
            self._sample_bits += 1
            for shadow in self.shadows:
                shadow.thin_out(self._sample_mask)
        mask = self._sample_mask
        sampled = [i for i, digest in enumerate(digests) if not digest & mask]
        if sampled:
            self._play(
                [digests[i] for i in sampled],
                [ages[i] for i in sampled],
                draw,
                max(1, slots >> self._sample_bits),
                free,
            )
        return ages, draw

    def _play(
        self, digests: Sequence[int], ages: Sequence[int], draw: int, slots: int, free: int
    ) -> None:
        """Let every shadow see the same sightings; the best one decides from here."""
        fading = 0.5 ** (len(digests) / (_HALF_LIFE * slots))
        for shadow in self.shadows:
            hits, writes = shadow.sight(digests, ages, draw, slots, free)
            shadow.hits = shadow.hits * fading + hits
            shadow.writes = shadow.writes * fading + writes
        self._evidence += len(digests) if not free else 0
        if self._evidence >= _PATIENCE * slots:
            self._best = max(self.shadows, key=lambda shadow: shadow.score)


# -- names and limits ---------------------------------------------------------------------------

ADMISSION: dict[str, Callable[[], AdmissionPolicy]] = {
    "learned": LearnedAdmission,
    "always": lambda: RuleAdmission(ALWAYS),
    "second-touch": lambda: RuleAdmission(SECOND_TOUCH),
}
"""By the names that the settings use; the first is the default."""

_DAY_S = 86_400.0
_BURST = 8  # an eighth of a day's bytes may be written at once, seven eighths come over the day


class WriteBudget:
    """At most `bytes_per_day` in any 24 hours of the life of this object: a token bucket.

    The caller serialises calls and passes the time in seconds of a clock that never goes back.
    """

    def __init__(self, bytes_per_day: int, now_s: float) -> None:
        self._room_bytes_max = bytes_per_day / _BURST
        self._bytes_per_s = bytes_per_day * (1 - 1 / _BURST) / _DAY_S
        self._room_bytes = self._room_bytes_max
        self._at_s = now_s

    @staticmethod
    def least(size_bytes: int) -> int:
        """The least bytes per day of which `size_bytes` can ever be taken at once."""
        return _BURST * size_bytes

    def take(self, size_bytes: int, now_s: float) -> bool:
        """Take `size_bytes` off the budget; False if it has not so many left now."""
        earned = (now_s - self._at_s) * self._bytes_per_s
        self._room_bytes = min(self._room_bytes_max, self._room_bytes + earned)
        self._at_s = now_s
        if size_bytes > self._room_bytes:
            return False
        self._room_bytes -= size_bytes
        return True
