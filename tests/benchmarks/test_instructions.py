"""Counting instructions along the loop of a kernel, from what a disassembler prints."""

from __future__ import annotations

from benchmarks.gpu.instructions import hot_path, kernels_of

_KERNEL = "adam_kernel<megafsdp::Keeping<megafsdp::Zeros<int> >, float, unsigned short, float>(int)"
_PRINTED = f"""
        Function : void megafsdp::(anonymous namespace)::{_KERNEL}
        /*0000*/                   S2R R0, SR_TID.X ;           /* 0x0000000000007919 */
        /*0010*/                   BSSY B0, 0x80 ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P0 BRA 0x60 ;
        /*0040*/                   CALL.REL.NOINC 0x100 ;
        /*0050*/                   BRA 0x70 ;
        /*0060*/               @P1 FMUL R11, R4, R4 ;
        /*0070*/                   BSYNC B0 ;
        /*0080*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*0090*/               @P2 BRA 0x10 ;
        /*00a0*/                   STG.E desc[UR4][R2.64], R4 ;
        /*00b0*/                   BRA 0x10 ;
        /*00c0*/                   EXIT ;
        Function : void megafsdp::another_kernel(int)
        /*0000*/                   EXIT ;
"""


def test_the_shortest_way_around_the_loop_is_counted() -> None:
    """Without the prologue, calls of slow paths and stores of single elements."""
    ((name, code),) = kernels_of(_PRINTED).items()
    assert name == "Keeping float uint16 float" and len(code) == 13
    path = [instruction.address for instruction in hot_path(code)]
    assert path == [0x90, 0x10, 0x20, 0x30, 0x60, 0x70, 0x80]
