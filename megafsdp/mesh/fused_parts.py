"""The logical tensors inside a fused parameter: their order, sizes and names on disk.

These are only declarations: ``megafsdp.checkpoint`` and the optimizers cut tensors by them.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from megafsdp.errors import expected


@dataclass(frozen=True, slots=True)
class FusedParts:
    """Logical tensors laid one after another along one dimension of a fused parameter.

    Example: a SwiGLU ``linear_fc1`` of shape (2I, H) is ``FusedParts(("gate", "up"), (I, I))``; an
    attention ``linear_qkv`` whose rows repeat [q heads; k; v] for each of 2 query groups is
    ``FusedParts(("query", "key", "value"), (hpg * hd, hd, hd), num_groups=2)``.

    Attributes:
        names: The names of the parts.
        sizes: Size of each part along ``dim``, within one group.
        dim: The dimension along which the parts lie.
        num_groups: How often the sequence of parts repeats along ``dim``.
        stored_as: The name of each part in checkpoints, which replaces the last two components of
            the parameter's name: a template of ``{module}`` and ``{parameter}``, such as
            ``"{module}.{parameter}_w"``. None means that checkpoints store the parameter whole.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0
    num_groups: int = 1
    stored_as: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check that the declaration is consistent.

        Raises:
            ValueError: Names and sizes differ in number, a size is not positive, a name repeats, or
                the templates do not name each part.
        """
        if len(self.names) != len(self.sizes) or len(set(self.names)) != len(self.names):
            raise ValueError(
                expected(
                    "one distinct name for each part size",
                    f"names {self.names} and sizes {self.sizes}",
                    where="FusedParts",
                    hint="Give as many names as sizes, each once",
                )
            )
        if min(self.sizes, default=0) < 1 or self.num_groups < 1:
            raise ValueError(
                expected(
                    "positive part sizes and a positive number of groups",
                    f"sizes {self.sizes}, num_groups {self.num_groups}",
                    where="FusedParts",
                    hint="Leave out parts that have no rows",
                )
            )
        if self.stored_as is not None and not _name_each_part(self.stored_as, len(self.names)):
            raise ValueError(
                expected(
                    "one distinct template of {module} and {parameter} for each part",
                    repr(self.stored_as),
                    where=f"stored_as of the fused parts {self.names}",
                    hint="Write for example '{module}.{parameter}_w', or leave stored_as out",
                )
            )

    @property
    def extent(self) -> int:
        """Return the size of the fused parameter along ``dim``."""
        return sum(self.sizes) * self.num_groups


def gate_and_up(width: int, *, dim: int = 0) -> FusedParts:
    """Declare the first matrix of a gated MLP: [gate; up], each of ``width`` rows along ``dim``."""
    # The suffixes are the same as in NVIDIA's checkpoints.
    stored_as = ("{module}.{parameter}_w", "{module}.{parameter}_v")
    return FusedParts(("gate", "up"), (width, width), dim, stored_as=stored_as)


def _name_each_part(templates: tuple[str, ...], num_parts: int) -> bool:
    """Return whether templates are distinct, one for each part, and use only known fields."""
    # A part stored under the whole parameter's name would be loaded instead of the parameter.
    if len({*templates, "{module}.{parameter}"}) != num_parts + 1 or len(templates) != num_parts:
        return False
    try:
        fields = {f for t in templates for _, f, _, _ in string.Formatter().parse(t)}
    except ValueError:
        return False
    return all(templates) and fields <= {"module", "parameter", None}
