"""Saves by torch's ``HuggingFaceStorageWriter``, whose files have one tensor a name.

Of the write items that a rank plans for a tensor, the writer keeps the last. torch's own DTensors
have one. Here a rank may have several regions: in a stack that is cut inside a matrix, and where a
model axis cuts fused tensors::

    rows of a stack (3, 6, K)    0 ... 5 | 6 ... 11 | 12 ... 17
    rank 0, rows 0-8             1111111   222              two regions, the first is lost
    rank 1, rows 9-17                         111     2222222

This file only refuses such saves. A save plans before it writes, and the answer follows from the
layout, so all ranks refuse alike and nothing is written.
"""

from __future__ import annotations

from torch.distributed.checkpoint import HuggingFaceStorageWriter

from megafsdp.buffer.dtensor.cures import cure_of
from megafsdp.buffer.dtensor.uneven_layout import UnevenLayout
from megafsdp.errors import expected
from megafsdp.mesh.torch_private import planned_writer


def check_writer(fqn: str, layout: UnevenLayout) -> None:
    """Check that the writer of the save that is being planned keeps all of a tensor; local.

    Raises:
        NotImplementedError: It is a ``HuggingFaceStorageWriter``, which would lose elements.
    """
    writer = planned_writer()
    if not isinstance(writer, HuggingFaceStorageWriter):
        return
    cure = "HuggingFaceStorageWriter"
    if not writer.save_distributed:
        # Every rank would write the same file, and the last one's rows would pass for the whole.
        if layout.part.is_whole and layout.num_shards == 1:
            return
        wanted, got = "save_distributed=True", "save_distributed=False"
        cure = "HuggingFaceStorageWriter by one rank"
    # torch copies no element of a 0-d tensor when it joins the files of ranks.
    elif not layout.shape:
        wanted, got = "a tensor with dimensions", "a 0-d tensor"
    elif (num_regions := layout.max_num_regions()) > 1:
        wanted, got = "one region of the tensor on each rank", f"up to {num_regions}"
    else:
        return
    raise NotImplementedError(
        expected(
            wanted,
            got,
            where=f"a save of '{fqn}' of shape {layout.shape} by HuggingFaceStorageWriter, which "
            "keeps one region of a tensor in each file",
            hint=cure_of(cure),
        )
    )
