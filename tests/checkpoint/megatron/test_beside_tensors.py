"""What stands beside tensors: schedules, counts, random states, words; in any form, both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megafsdp.checkpoint import save
from megafsdp.checkpoint.megatron.exporter import to_megatron
from megafsdp.checkpoint.megatron.importer import from_megatron
from megafsdp.checkpoint.tools.reader import CheckpointReader
from megafsdp.checkpoint.tools.writer import CheckpointWriter
from megafsdp.errors import CheckpointError
from megafsdp.models import build_model
from tests.checkpoint.megatron import megatron_toy as toy


def _from_job(root: Path, architecture: str) -> Path:
    """Return a save root of ours made of a job's directory."""
    toy.make(root / "job", architecture)
    from_megatron(root / "job", root / "from-job")
    return root / "from-job"


def test_states_that_are_no_tensors_go_both_ways_beside_fused_parameters(tmp_path: Path) -> None:
    """Each part has them, in a stack of experts too."""
    state = toy.their_state(*toy.trained("qwen3_next"), "qwen3_next", has_step_in_group=False)
    for states in state["optimizer"]["state"].values():
        states |= {"mode": "slow", "step": 2}
    toy.save(state, tmp_path / "theirs")
    from_megatron(tmp_path / "theirs", tmp_path / "ours")
    with CheckpointReader(tmp_path / "ours") as reader:
        for part in ("_w", "_v"):
            at = f"optimizer.state.decoder.layers.1.mlp.experts.linear_fc1.weight{part}"
            assert reader.object(f"{at}.mode") == "slow"
            assert f"{at}.exp_avg" in reader.manifest.tensors
            assert torch.equal(reader.tensor(f"{at.removesuffix(part)}.step"), torch.tensor(2.0))
        assert not any(key.endswith(".mode") for key in reader.fused)
    to_megatron(tmp_path / "ours", tmp_path / "back")
    found, was = (
        {k: v for k, v in toy.read(tmp_path / name / "iter_0000002").items() if k.endswith(".mode")}
        for name in ("back", "theirs")
    )
    assert found == was and len(found) > 40


def test_a_run_that_goes_on_counts_its_own_samples(tmp_path: Path) -> None:
    """The job's schedule goes on where this run stopped, not where the job did."""
    with CheckpointReader(_from_job(tmp_path, "qwen3")) as reader:
        extra = reader.object("extra")
    extra["run"] = {"step": 5, "consumed_samples": 40, "skipped_samples": 4}
    save(tmp_path / "ours", step=5, model=toy.build("qwen3", 0), extra=extra)
    found = toy.read(to_megatron(tmp_path / "ours", tmp_path / "back"))
    assert found["opt_param_scheduler.num_steps"] == 36
    assert found["args"].consumed_train_samples == 40
    fields = {k: v for k, v in toy.SCHEDULE.items() if k != "num_steps"}
    assert {name: found[f"opt_param_scheduler.{name}"] for name in fields} == fields
    # A caller that counts no samples leaves those of the job.
    del extra["run"]
    save(tmp_path / "ours", step=6, model=toy.build("qwen3", 0), extra=extra)
    found = toy.read(to_megatron(tmp_path / "ours", tmp_path / "back"))
    assert found["opt_param_scheduler.num_steps"] == 16


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda s: s["opt_param_scheduler"].update(num_steps=3.5), "num_steps"),
        (lambda s: setattr(s["args"], "consumed_train_samples", None), "consumed_train_samples"),
        (lambda s: s["opt_param_scheduler"].update(max_lr="high"), "'high'"),
        (lambda s: s.update(rng_state={"(0, 0)": 3}), r"rng_state\.\(0, 0\)"),
        (lambda s: s.update(rng_state={"(0, 0)": [3]}), r"rng_state\.\(0, 0\)"),
    ],
    ids=["num_steps", "consumed", "rate", "one state", "states of no form"],
)
def test_values_of_another_form_are_refused(
    tmp_path: Path, change: Callable[[dict], object], word: str
) -> None:
    """The message says where they are, and nothing is published."""
    state = toy.their_state(*toy.trained("qwen3"), "qwen3")
    change(state)
    toy.save(state, tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=word):
        from_megatron(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists() or not list((tmp_path / "ours").iterdir())


def test_a_list_of_numbers_is_one_value(tmp_path: Path) -> None:
    """As torch DCP keeps it, which takes lists apart for the dicts in them."""
    with CheckpointReader(_from_job(tmp_path, "gpt")) as ours:
        keys = ours.manifest.tensors
        groups = [
            {**group, "betas": [0.9, 0.95]} for group in ours.object("optimizer.param_groups")
        ]
        with CheckpointWriter(tmp_path / "ours", 1) as writer:
            for key in keys:
                writer.add_tensor(key, ours.tensor(key))
            writer.add_object("optimizer.param_groups", groups)
            writer.publish()
    path = to_megatron(tmp_path / "ours", tmp_path / "theirs")
    betas = {k: v for k, v in toy.read(path).items() if ".betas" in k}
    assert set(map(repr, betas.values())) == {"[0.9, 0.95]"}
    assert all(key.endswith(".betas") for key in betas) and len(betas) > 20


def test_what_has_no_place_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """States of other objects; what every checkpoint has is not."""
    for step, (name, value) in enumerate((("extra", {}), ("sampler", {"epoch": 3}))):
        with CheckpointWriter(tmp_path / "ours", step) as writer:
            writer.add_tensor("model.weight", torch.ones(2))
            writer.add_object(name, value)
            writer.publish()
        to_megatron(tmp_path / "ours", tmp_path / "theirs")
        assert ("Megatron-LM has no place for sampler" in caplog.text) is (step == 1)
        assert ("no place" in caplog.text) is (step == 1)


def test_heads_that_share_no_keys_are_no_groups(tmp_path: Path) -> None:
    """A load compares the arguments with those of the job."""
    for step, num_groups in enumerate((4, 2)):
        config = replace(toy.config("qwen3"), num_query_groups=num_groups)
        save(tmp_path / "ours", step=step, model=build_model(config))
        args = vars(toy.read(to_megatron(tmp_path / "ours", tmp_path / "theirs"))["args"])
        assert args["num_attention_heads"] == 4 and args["num_query_groups"] == num_groups
        assert args["group_query_attention"] is (num_groups == 2)


def test_a_checkpoint_of_weights_alone_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without arguments nothing is taken for tied, and without a schedule nothing was skipped."""
    state = toy.their_state(*toy.trained("gpt"), "gpt")
    for section in ("optimizer", "opt_param_scheduler", "rng_state"):
        del state[section]
    state["iteration"] = 0
    with_args = state | {"args": toy.arguments(apply_layernorm_1p=True)}
    for name, given in (("no-args", {k: v for k, v in state.items() if k != "args"}),
                        ("args", with_args)):  # fmt: skip
        caplog.clear()
        toy.save(given, tmp_path / name)
        from_megatron(tmp_path / name, tmp_path / f"ours-{name}")
        with CheckpointReader(tmp_path / f"ours-{name}") as reader:
            has_args = name == "args"
            consumed = 16 if has_args else 0
            run = {"step": 0, "consumed_samples": consumed, "skipped_samples": 0}
            assert reader.object("extra")["run"] == run
            assert list(reader.manifest.aliases) == ["model.output_layer.weight"] * has_args
            assert reader.manifest.world_size == 0
        assert ("has no args" in caplog.text) is not has_args
        assert ("norm weights are stored less 1" in caplog.text) is has_args


def test_random_states_of_other_ranks_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the ranks of the first cell have a counterpart."""
    state = toy.their_state(*toy.trained("qwen3"), "qwen3")
    for cells in (["(0, 0)"], ["(0, 0)", "(1, 0)"]):
        state["rng_state"] = {cell: [toy.rng(1)] for cell in cells}
        toy.save(state, tmp_path / f"theirs-{len(cells)}")
        from_megatron(tmp_path / f"theirs-{len(cells)}", tmp_path / f"ours-{len(cells)}")
        text = "random states of other model-parallel ranks are not used: rng_state.(1, 0)"
        assert (text in caplog.text) is (len(cells) == 2)
