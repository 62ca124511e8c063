"""The fp32 values that a quantized parameter's codes are made from, where its rows lie, and copies.

An optimizer steps the values; :mod:`megafsdp.fsdp.runtime.torch_fsdp` makes codes of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from megafsdp.device.memory import outside_inference_mode
from megafsdp.device.torch_private import version_of
from megafsdp.quantize.tiles import Fragment


@dataclass(frozen=True, slots=True)
class Layout:
    """What encodings of a weight share, found in the first.

    Attributes:
        values: The memory of the main weight.
        fragment: The same, as rows of what scales are made for.
        num_maxima: Tiles of that.
        table_nbytes: Of its table; 0 where the parameter's own table is that.
    """

    values: Tensor
    fragment: Fragment
    num_maxima: int
    table_nbytes: int


@dataclass(slots=True)
class MainWeight:
    """The main weight of one parameter, where its rows lie, and who has others under its scales.

    Attributes:
        values: Of this rank, like the parameter.
        shape: Of the whole that scales are made for: of these rows, where they are a rank's own.
        first: The first index of dimension 0 there.
        groups: The ranks over which maxima are combined, one group after the other.
        first_row: The first index of dimension 0 in what data axes divide.
        recorded_groups: The ranks over which what layers have recorded is combined besides.
        layout: What the first encoding has found.
        encoded_version: The version of the values at their last encoding.
        has_other_codes: Whether codes were copied to the parameter since.
        former: The values that it had on other memory, before the parameter was moved.
    """

    values: Tensor
    shape: tuple[int, ...]
    first: int = 0
    groups: tuple[dist.ProcessGroup, ...] = ()
    first_row: int = 0
    recorded_groups: tuple[dist.ProcessGroup, ...] = ()
    layout: Layout | None = field(default=None, kw_only=True)
    encoded_version: int = field(default=-1, kw_only=True)
    has_other_codes: bool = field(default=False, kw_only=True)
    former: tuple[weakref.ref[Tensor], ...] = field(default=(), kw_only=True)

    @staticmethod
    def of_whole(values: Tensor) -> MainWeight:
        """Return the main weight of a parameter that no other rank has rows of, just encoded.

        Values that were made in inference mode are copied: these have no count of writes.
        """
        if values.is_inference():
            with outside_inference_mode():
                values = values.clone()
        made = MainWeight(values, tuple(values.shape))
        made.note_encoded()
        return made

    def replace(self, values: Tensor) -> None:
        """Use other memory, with other values."""
        if values is not self.values:
            self.values, self.encoded_version = values, -1

    def note_encoded(self) -> None:
        """Record that codes and values agree."""
        self.encoded_version, self.has_other_codes = version_of(self.values), False

    def copied(self, copy: Callable[[Tensor], Tensor], decode: Callable[[], Tensor]) -> MainWeight:
        """Return the main weight of a copy of the parameter, a whole.

        Args:
            copy: Copies the values.
            decode: Returns what the codes stand for in fp32; called if these were loaded alone.
        """
        return MainWeight.of_whole(copy(decode() if self.is_overtaken else self.values))

    def was(self, values: Tensor) -> bool:
        """Return whether these values were the main weight before the parameter was moved."""
        return any(each() is values for each in self.former)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Return None: torch stages parameters for a save attribute by attribute."""

    @property
    def is_overtaken(self) -> bool:
        """Return whether codes were loaded and values were not."""
        return self.has_other_codes and version_of(self.values) == self.encoded_version

    @property
    def is_of_whole(self) -> bool:
        """Return whether no other rank has part in its scales, so that the values are enough."""
        return not self.groups and not self.recorded_groups
