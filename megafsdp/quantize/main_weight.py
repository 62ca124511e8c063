"""The fp32 main weight of a quantized parameter: its values, the place of its rows, and copies.

An optimizer steps the values; :mod:`megafsdp.fsdp.runtime.torch_fsdp` makes codes from them.
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
    """Facts that all encodings of a weight share, found in the first.

    Attributes:
        values: The memory of the main weight.
        fragment: The same memory, as rows of the tensor that scales are made for.
        num_maxima: Number of that tensor's tiles.
        table_nbytes: Bytes of that tensor's table; 0 if it is the parameter's own table.
    """

    values: Tensor
    fragment: Fragment
    num_maxima: int
    table_nbytes: int


@dataclass(slots=True)
class MainWeight:
    """The main weight of one parameter, the place of its rows, and the ranks that share its scales.

    Attributes:
        values: This rank's values, a tensor like the parameter.
        shape: Shape of the tensor that scales are made for: the whole one, or only these rows if no
            other rank's rows affect their scales.
        first: First index of dimension 0 in that tensor.
        groups: The groups of ranks over which maxima are combined, one after the other.
        first_row: First index of dimension 0 in the part that data axes divide.
        recorded_groups: Further groups over which the maxima that layers record are combined.
        layout: The facts that the first encoding has found.
        encoded_version: The version of the values at their last encoding.
        has_other_codes: Whether codes were copied to the parameter since.
        former: The values before the parameter was moved to other memory.
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
        """Return the main weight of a parameter that this rank has whole, marked as encoded.

        Values that were made in inference mode are copied, as such tensors do not count writes.
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
        """Return the main weight for a copy of a whole parameter.

        Args:
            copy: Copies the values.
            decode: Returns the decoded codes in fp32; called if only codes were loaded.
        """
        return MainWeight.of_whole(copy(decode() if self.is_overtaken else self.values))

    def was(self, values: Tensor) -> bool:
        """Return whether these values were the main weight before the parameter was moved."""
        return any(each() is values for each in self.former)

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """Return None: torch copies parameters attribute by attribute to stage a save."""

    @property
    def is_overtaken(self) -> bool:
        """Return whether codes were loaded since the last encoding, but not values."""
        return self.has_other_codes and version_of(self.values) == self.encoded_version

    @property
    def is_of_whole(self) -> bool:
        """Return whether the scales depend on this rank's values only."""
        return not self.groups and not self.recorded_groups
