"""The program that type checkers read does what it says; mypy reads it with the package."""

from __future__ import annotations

import inspect
import typing

import megafsdp
from megafsdp import FSDPModule, fully_shard, fully_shard_model
from megafsdp.fsdp.keywords import ShardKeywords
from tests.fsdp import typed_program
from tests.ranks import Ranks


def _run() -> None:
    losses = typed_program.train()
    assert len(losses) == 2 and losses[0] == losses[1], "one step of two microbatches"
    model = typed_program.shard_whole()
    assert isinstance(model, FSDPModule)
    typed_program.mistakes(model)


def test_the_typed_program_runs(ranks: Ranks) -> None:
    """Every method and keyword in it is one that exists."""
    ranks(2).run(_run)


def test_the_overloads_have_the_keywords_of_the_functions() -> None:
    """One list of names in three places, and every public method of a unit in the program."""
    names = set(typing.get_type_hints(ShardKeywords))
    for function in (fully_shard, fully_shard_model):
        parameters = inspect.signature(function).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == names
    source = inspect.getsource(typed_program)
    methods = [name for name in vars(megafsdp.FSDPModule) if not name.startswith("_")]
    assert not [name for name in methods if f".{name}(" not in source]
