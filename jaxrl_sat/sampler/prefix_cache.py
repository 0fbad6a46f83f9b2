"""Which pieces of prompts have been read before: a table on the host of what a pool on the device holds.

A piece is C tokens of a prompt from a multiple of C on, and everything before them is part of its name. What its
reading gives depends on nothing else, so a prompt that begins with kept pieces goes on from there, bit for bit as if
they were read again.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import weakref

import numpy as np

from jaxrl_sat.sampler.weights import Weights


@dataclasses.dataclass(frozen=True)
class Found:
    """Places in the pool of a batch's pieces, [B, n]; the pool's size for those that are not there."""

    blocks: np.ndarray  # int32
    versions: np.ndarray  # int32, of the weights that read each; meaningless for those that are not there


class PrefixCache:
    """A table of `size` places, the least recently used given away first. Forgets all where other weights come,
    unless it `keeps` them."""

    def __init__(self, size: int, piece: int, keeps: bool):
        self.size = size
        self._piece, self._keeps = piece, keeps
        self._places: collections.OrderedDict[bytes, tuple[int, int]] = collections.OrderedDict()  # place and version
        self._weights: weakref.ref[Weights] | None = None

    def forget(self) -> None:
        """Empty the table."""
        self._places.clear()

    def find(self, weights: Weights, tokens: np.ndarray, lengths: np.ndarray) -> Found:
        """Where the leading pieces of prompts [B, P] are."""
        if self._weights is None or self._weights() is not weights:
            self._weights = weakref.ref(weights)
            if not self._keeps:
                self._places.clear()
        blocks, versions = np.full((2, len(tokens), tokens.shape[1] // self._piece), self.size, np.int32)
        for row, names in enumerate(map(self._names, tokens, lengths.tolist())):
            known = next((i for i, name in enumerate(names) if name not in self._places), len(names))
            for index in reversed(range(known)):  # the first ones last, as those after them are of no use without
                self._places.move_to_end(names[index])
                blocks[row, index], versions[row, index] = self._places[names[index]]
        return Found(blocks, versions)

    def keep(self, tokens: np.ndarray, lengths: np.ndarray, version: int) -> np.ndarray:
        """Places [B, n] for the pieces that are not there yet, read by weights `version`; `size` for all others."""
        blocks = np.full((len(tokens), tokens.shape[1] // self._piece), self.size, np.int32)
        for row, names in enumerate(map(self._names, tokens, lengths.tolist())):
            new = [index for index, name in enumerate(names[: self.size]) if name not in self._places]
            for index in new:
                full = len(self._places) == self.size
                place = self._places.popitem(last=False)[1][0] if full else len(self._places)
                self._places[names[index]] = (place, version)
                blocks[row, index] = place
            for name in reversed(names[: self.size]):
                if name in self._places:
                    self._places.move_to_end(name)
        return self._once(blocks)

    def _once(self, blocks: np.ndarray) -> np.ndarray:
        """A place given away twice in one batch belongs to the last who got it."""
        last = {place: index for index, place in enumerate(blocks.ravel())}
        mine = [last[place] == index for index, place in enumerate(blocks.ravel())]
        return np.where(np.reshape(mine, blocks.shape), blocks, self.size).astype(np.int32)

    def _names(self, tokens: np.ndarray, length: int) -> list[bytes]:
        names, name = [], b""
        for index in range(length // self._piece):
            piece = np.ascontiguousarray(tokens[index * self._piece : (index + 1) * self._piece], np.int32)
            name = hashlib.blake2b(name + piece.tobytes(), digest_size=16).digest()
            names.append(name)
        return names
