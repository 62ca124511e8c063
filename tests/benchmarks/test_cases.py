"""Benchmarks run, refuse to print when a side is wrong, and write whole records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import (
    adam,
    checkpoint,
    exits,
    fsdp_step,
    host,
    optimizer_step,
    quantize,
    quantize_rivals,
    quantized_step,
    scale,
)
from benchmarks.__main__ import main
from benchmarks.gpt_step import Shape, build
from benchmarks.launch import launch
from benchmarks.record import CheckError
from megafsdp._native import cuda_module
from megafsdp.models import build_model, presets
from megafsdp.optimizer.kernels.hyper import AdamHyper
from megafsdp.quantize.recipes import recipe_of
from tests.native import compiled

SHAPE = ["--layers", "2", "--hidden", "16", "--sequence", "8", "--vocabulary", "32"]
THIN = ["scale", "--layers", "2", "--hidden", "16", "--repeats", "1"]
TINY = [*SHAPE, "--dtypes", "bf16", "--repeats", "1"]
MACHINE = {"device", "hardware", "cpu", "cores", "memory_gib"}
VERSIONS = {"python", "torch", "megafsdp", "commit", "is_dirty"}


def _only_record(directory: Path) -> dict[str, object]:
    (path,) = directory.iterdir()
    record = json.loads(path.read_text())
    assert set(record) == {"case", "date", "machine", "versions", "results"}
    assert set(record["machine"]) == MACHINE and set(record["versions"]) == VERSIONS
    assert path.name == f"{record['case']}_{record['machine']['hardware']}_{record['date']}.json"
    return record


@pytest.mark.matrix("benchmarks")
def test_a_step_is_timed_against_fsdp2_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The record holds the ratio, the spread, phases, collectives, bytes and our host time."""
    main(["--records", str(tmp_path), "fsdp_step", *TINY])
    assert "ratio" in capsys.readouterr().out
    case = _only_record(tmp_path)["results"]["2x16 bf16"]
    assert case["ratio_range"][0] <= case["ratio_range"][1]
    assert case["check"]["gradient"] <= case["check"]["tolerance"]
    for side in fsdp_step.SIDES:
        assert case["step_ms"][side]["count"] == 3
        assert case["processor_ms"][side]["median"] > 0
        assert set(case["phases_ms"][side]) == {"forward", "backward", "optimizer"}
        assert case["bytes"][side]["peak"] > case["bytes"][side]["resting"] > 0
    # Main weights and both moments, fp32 halves, are at rest; padding and step counts come on top.
    resting = case["bytes"]["megafsdp"]["resting"] / (case["num_parameters"] * 12 / 2)
    assert 1.0 <= resting < 1.1
    # Two ranks on gloo gather by an all-to-all too: 5 gathers and 3 reductions.
    expected = {"cpu": {"alltoall_base_": 8}, "cuda": {"_allgather_base_": 5}}
    device = _only_record(tmp_path)["results"]["device"]
    calls = case["collectives"]["megafsdp"]["calls"]
    assert expected[device].items() <= calls.items()
    assert case["collectives"]["fsdp2"]["calls"]["_reduce_scatter_base_"] == 3
    # Two in forward and two in backward of a unit; the root's last is the end of the backward.
    assert case["host"]["hooks_per_step"] == 4 * 3
    assert {"waiting", "packing", "casting"} < set(case["host"]["hooks_ms_per_step"])
    assert 0 <= case["host"]["share_of_collective_time_not_waited_for"] <= 1


@pytest.mark.matrix("benchmarks")
def test_steps_of_recipes_are_timed_against_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights alone and all operands, over our bf16 and FSDP2; bytes are a half or a quarter."""
    sizes = ["--layers", "2", "--hidden", "32", "--sequence", "8", "--vocabulary", "32"]
    arguments = ["fsdp_step", *sizes, "--recipe", "mxfp8", "nvfp4", "--repeats", "1"]
    main(["--records", str(tmp_path), *arguments])
    assert "mxfp8, weights: " in capsys.readouterr().out
    case = _only_record(tmp_path)["results"]["2x32 bf16"]
    shares = {"mxfp8": 0.5, "nvfp4": 0.25}
    names = [f"{name}, {of}" for name in shares for of in ("weights", "all operands")]
    assert list(case["ratio_to_bf16"]) == names
    assert list(case["ratio_to_fsdp2"]) == ["megafsdp", *names]
    for name in names:
        low, high = case["range_to_bf16"][name]
        assert 0 < low <= high and case["processor_ratio_to_bf16"][name] > 0
        share = shares[name.split(",")[0]]
        for part in ("gathered_ratio", "unsharded_ratio"):
            assert case["bytes"][name][part] == pytest.approx(share, abs=0.01)


def _refusals() -> list[list[str]]:
    """Return what is said of sides in mxfp8 that are taken for codes of 8 and of 4 bits."""
    return [_refuse_a_claim_of(num_bits) for num_bits in (8, 4)]


def _refuse_a_claim_of(num_bits: int) -> list[str]:
    shape = Shape(2, 32, sequence=8, batch=1, vocabulary=32, dtype="bf16")
    recipe = recipe_of("mxfp8", quantize_activations=False)
    sides = {name: build(shape, name) for name in ("fsdp2", "megafsdp")}
    sides["mxfp8"] = build(shape, "megafsdp", recipe=recipe)
    found = []
    bits = {"mxfp8": num_bits}
    # Bytes are those of steps, after which FSDP2's weights are others.
    for check, arguments in (
        (quantized_step._check_gradients, [1.0]),
        (quantized_step._check_bytes, []),
    ):
        try:
            check(shape, sides, bits, *arguments)
        except CheckError as error:
            found.append(str(error))
    return found


def test_no_ratio_is_given_of_a_recipe_that_is_not_what_it_claims() -> None:
    """Bytes of others, or gradients with errors of others, end the run."""
    rightly, refusals = launch(_refusals, num_ranks=2)
    assert rightly == []
    assert refusals[0].startswith("gradients differ: mxfp8 by ")
    assert "gathered of mxfp8: " in refusals[1] and "unsharded of mxfp8: " in refusals[1]


def _peaks() -> dict[str, int]:
    shape = Shape(3, 64, sequence=32, batch=4, vocabulary=1024, dtype="bf16")
    return {side: fsdp_step._measure_bytes(shape, side)["peak"] for side in fsdp_step.SIDES}


def test_the_peak_of_a_bf16_step_is_at_most_fsdp2s() -> None:
    """All that is alive counted, uncut rows and alignment included."""
    peaks = launch(_peaks, num_ranks=2)
    assert peaks["megafsdp"] <= peaks["fsdp2"]


def test_no_figure_is_given_when_the_sides_disagree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failed correctness check ends the run before anything is timed, shown or written."""
    with pytest.raises(Exception, match=r"CheckError.* differs by"):
        main(["--records", str(tmp_path), "fsdp_step", *TINY, "--ranks", "1", "--tolerance", "-1"])
    assert "ratio" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.matrix("benchmarks")
def test_a_step_with_tp_is_timed_against_torchs_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only after the losses of both sides have agreed; then each mesh has its ratio."""
    tiny = ["tp_step", *SHAPE, "--data", "1", "--repeats", "1"]
    with pytest.raises(Exception, match=r"CheckError.* losses differ by"):
        main(["--records", str(tmp_path), *tiny, "--tolerance", "-1"])
    assert "ratio" not in capsys.readouterr().out and not list(tmp_path.iterdir())
    main(["--records", str(tmp_path), *tiny])
    case = _only_record(tmp_path)["results"]["dp 1 x tp 2"]
    assert case["check"]["loss"] <= case["check"]["tolerance"]
    assert case["ratio_range"][0] <= case["ratio"] <= case["ratio_range"][1]
    assert all(case["step_ms"][side]["count"] == 3 for side in ("megafsdp", "torch"))


def test_the_gated_delta_rule_is_timed_against_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only after losses and gradients of both sides have agreed; each length has its ratio."""
    pytest.importorskip("transformers")
    tiny = ["gated_delta", "--lengths", "24", "--tokens", "24", "--repeats", "1"]
    with pytest.raises(CheckError, match="T 24: the sides differ by"):
        main(["--records", str(tmp_path), *tiny, "--tolerance", "-1"])
    assert "ratio" not in capsys.readouterr().out and not list(tmp_path.iterdir())
    main(["--records", str(tmp_path), *tiny])
    for preset in ("qwen3-next-toy", "qwen3-next-80b-a3b"):
        case = _only_record(tmp_path)["results"][f"{preset}, T 24"]
        assert case["check"]["difference"] <= case["check"]["tolerance"]
        assert case["ratio_range"] == [case["ratio"]] * 2


@pytest.mark.matrix("benchmarks")
def test_a_step_of_experts_is_timed_against_torchs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Losses agree first; expert parallelism halves the bytes that gather experts."""
    sizes = ["--layers", "2", "--hidden", "32", "--experts", "8", "--width", "16"]
    tiny = ["moe_step", *sizes, "--sequence", "8", "--repeats", "1"]
    with pytest.raises(Exception, match=r"CheckError.* losses differ by"):
        main(["--records", str(tmp_path), *tiny, "--edp", "1", "--tolerance", "-1"])
    assert "ratio" not in capsys.readouterr().out and not list(tmp_path.iterdir())
    main(["--records", str(tmp_path), *tiny])
    results = _only_record(tmp_path)["results"]
    for edp in (1, 2):
        case = results[f"ep 2 x edp {edp}"]
        assert case["check"]["loss"] <= case["check"]["tolerance"]
        assert case["ratio_range"][0] <= case["ratio"] <= case["ratio_range"][1]
        # Two layers, each gathered twice; 3 matrices of 8 experts.
        all_experts = 2 * 2 * 4 * 3 * 8 * 16 * 32
        wanted = {"ep": all_experts // 2 if edp > 1 else 0, "no ep": all_experts}
        assert case["expert_gather_nbytes"] == wanted


def test_the_layout_table_holds_what_the_planner_promises(tmp_path: Path) -> None:
    """Whole models pad less than 0.5 percent, where one buffer pads several."""
    main(["--records", str(tmp_path), "layout", "--timed-shards", "64"])
    results = _only_record(tmp_path)["results"]
    table = results["padding"]
    for row in table.values():
        assert all(row[n]["padding_percent"] < 0.5 for n in ("8", "64", "512", "1024"))
    for name, preset in (
        ("Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen3-Next-80B", "qwen3-next-80b-a3b"),
    ):
        with torch.device("meta"):
            model = build_model(presets[preset])
        assert table[name]["num_parameters"] == sum(p.numel() for p in model.parameters())
        assert max(results["experts"][name].values()) < 0.5
    llama = table["Llama-3-8B"]
    assert llama["num_parameters"] == 8_030_261_248
    assert llama["1024"]["single_buffer_percent"] == pytest.approx(6.76, abs=0.01)
    assert llama["1024"]["padding_percent"] == pytest.approx(0.09, abs=0.005)


@pytest.mark.matrix("benchmarks")
def test_worlds_are_compared_on_the_fake_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each world has times without the backend's, the same collectives, and bytes by category."""
    main(
        [
            "--records",
            str(tmp_path),
            *THIN,
            "--tp",
            "1",
            "4",
            "4",
            "--ep",
            "1",
            "1",
            "4",
            "--worlds",
            "4",
            "64",
        ]
    )
    assert "ratio 1.000" in capsys.readouterr().out
    degrees = _only_record(tmp_path)["results"]
    assert list(degrees) == ["tp 1 ep 1", "tp 4 ep 1", "tp 4 ep 4"]
    # Layers but the last are gathered twice, the root once; norm and usage are all-reduced.
    data_calls = {"all_gather": 4, "reduce_scatter": 3}
    everyone_calls = {"all_reduce": 2}
    # Four of each a layer, the embedding and the output layer; two of the loss, one sum a unit.
    model_calls = {"all_gather": 10, "reduce_scatter": 10, "all_reduce": 2 + 3 + 2}
    plain, cut, mixed = (degrees[name]["worlds"] for name in degrees)
    assert [case["calls"] for case in plain.values()] == [data_calls | everyone_calls] * 2
    assert [case["model_calls"] for case in plain.values()] == [{}] * 2
    # Four ranks at tp 4 are one data rank.
    assert [case["calls"] for case in cut.values()] == [{}, data_calls]
    assert [case["model_calls"] for case in cut.values()] == [model_calls] * 2
    # Experts are gathered and reduced by themselves; without a layer's second pair of exchanges
    # counts and tokens go to experts, tokens come back, and both come back in backward.
    assert [case["calls"] for case in mixed.values()] == [
        {},
        {"all_gather": 7, "reduce_scatter": 5},
    ]
    exchanges = {"all_gather": 6, "reduce_scatter": 6, "all_to_all": 2 * 5, "all_reduce": 2 + 3 + 2}
    assert [case["model_calls"] for case in mixed.values()] == [exchanges] * 2
    for tp, worlds in zip((1, 4, 4), (plain, cut, mixed), strict=True):
        assert list(worlds) == ["4", "64"]
        for case in worlds.values():
            assert case["check"]["gradient"] <= case["check"]["tolerance"]
            assert 0 < case["step_ms"]["engine"]["median"] < case["step_ms"]["host"]["median"]
            assert all(case["setup_ms"][p]["median"] > 0 for p in ("wrap", "first_step"))
            resting, peak = case["resting_nbytes"], case["peak_nbytes"]
            assert resting["unsharded"] == resting["main grad"] == 0 < peak["unsharded"]
            assert resting["optimizer state"] <= 2 * resting["main weight"]
        padded = [1 + case["padding_percent"] / 100 for case in worlds.values()]
        shards = [case["resting_nbytes"]["main weight"] for case in worlds.values()]
        numel, nums_data = worlds["4"]["num_parameters"], [int(n) // tp for n in worlds]
        wanted = [4 * numel * p / n for p, n in zip(padded, nums_data, strict=True)]
        assert shards == [round(nbytes) for nbytes in wanted]


def test_worlds_that_issue_other_collectives_are_not_compared() -> None:
    """One data rank has no collective of data; every other difference is an error."""
    one = {"num_data_ranks": 1, "calls": {}, "model_calls": {"all_reduce": 2}, "model_nbytes": {}}
    many = one | {"num_data_ranks": 8, "calls": {"all_gather": 4}}
    scale._compare_collectives([8, 64, 512], [one, many, many])
    for name, other in (
        ("calls", {"all_gather": 5}),
        ("model_calls", {}),
        ("model_nbytes", {"all_reduce": 4}),
    ):
        with pytest.raises(CheckError, match=f"64 ranks issue {name} "):
            scale._compare_collectives([8, 64, 512], [one, many | {name: other}, many])


def test_no_time_is_given_when_a_world_is_wrong(tmp_path: Path) -> None:
    """Gradients that are not plain torch's end the run before anything is timed."""
    with pytest.raises(CheckError, match=r"on 4 ranks differ by"):
        main(
            [
                "--records",
                str(tmp_path),
                *THIN,
                "--tp",
                "2",
                "--ep",
                "2",
                "--worlds",
                "4",
                "--tolerance",
                "-1",
            ]
        )
    assert not list(tmp_path.iterdir())


def test_hooks_are_timed_against_fsdp2s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both sides issue the same collectives and give right gradients; wrong ones give no time."""
    arguments = ["host", "--worlds", "4", "--layers", "3", "--width", "4", "--repeats", "2"]
    main(["--records", str(tmp_path), *arguments])
    assert "4 ranks: " in capsys.readouterr().out
    case = _only_record(tmp_path)["results"]["worlds"]["4"]
    for side in host.SIDES:
        assert case["check"][side]["calls"] == {"all_gather": 6, "reduce_scatter": 3}
        assert case["check"][side]["gradient"] <= case["check"][side]["tolerance"]
        assert case["step_ms"][side]["min"] > 0 and case["hooks_ms_per_unit"][side] > 0
    assert case["ratio"] > 0 and len(case["ratio_quartiles"]) == 2
    with pytest.raises(CheckError, match="gradients differ by"):
        main(["--records", str(tmp_path), *arguments, "--tolerance", "-1"])
    assert "4 ranks: " not in capsys.readouterr().out


@pytest.mark.matrix("benchmarks")
def test_exit_codes_of_real_runs_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that trains ends with code 0; one that makes no step is no result."""
    main(["--records", str(tmp_path), "exits", "--runs", "1", "--ranks", "1"])
    assert "0 abnormal exits" in capsys.readouterr().out
    results = _only_record(tmp_path)["results"]
    assert results["exit_codes"]["destroyed"] == {"0": 1}


def test_signals_are_abnormal_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of three runs is aborted: it is counted, with what it wrote."""
    ends = iter([[(0, ""), (0, "")], [(0, ""), (-6, "terminate called")], [(0, ""), (0, "")]])
    monkeypatch.setattr(exits, "_run_once", lambda manner, num_ranks: next(ends))
    main(["--records", str(tmp_path), "exits", "--runs", "3"])
    results = _only_record(tmp_path)["results"]
    assert results["num_abnormal"] == 1 and results["errors"] == ["terminate called"]
    assert results["exit_codes"]["left open"] == {"0": 1, "-6": 1}


@compiled
@pytest.mark.matrix("benchmarks")
def test_adam_is_timed_against_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job has its ratios and its bandwidth; wrong bits give none."""
    arguments = ["adam", "--numel", "5000", "--threads", "1", "--repeats", "3"]
    main(["--records", str(tmp_path), *arguments])
    assert "ours over theirs" in capsys.readouterr().out
    jobs = _only_record(tmp_path)["results"]["5000 elements, threads 1"]
    assert set(jobs) == {"fp32", "bf16 to bf16", "subnormal"}
    for case in jobs.values():
        assert case["ms"]["megafsdp"]["count"] == 3 and case["probe_gb_per_s"] > 0
        low, high = case["ratio_range"]["fused"]
        assert 0 < low <= high
        assert case["ms"]["numba"]["median"] > 0
    assert jobs["bf16 to bf16"]["ratio"]["out of place"] > 0
    assert jobs["bf16 to bf16"]["ratio_of_remainders"]["fused"] > 0
    assert jobs["subnormal"]["ratio_to_dense"]["megafsdp"] > 0
    monkeypatch.setattr(adam, "_HYPER", AdamHyper(1e-3, (0.9, 0.95), 1e-8, 0.1, adam_w_mode=False))
    with pytest.raises(CheckError, match="differ from those of torch's fused AdamW by"):
        main(["--records", str(tmp_path), *arguments])
    assert "ours over theirs" not in capsys.readouterr().out


@compiled
@pytest.mark.matrix("benchmarks")
def test_quantization_is_timed_against_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every job has its ratios and its bandwidth at each level; wrong bits give none."""
    arguments = ["quantize", "--side", "256", "--threads", "1", "--repeats", "2"]
    main(["--records", str(tmp_path), *arguments])
    assert "x torchao" in capsys.readouterr().out
    results = _only_record(tmp_path)["results"]
    jobs = results["65536 elements, threads 1"]
    assert len(jobs) == 4 * 4 + 4 * 2 + 4
    for name, case in jobs.items():
        for level in results["levels"]:
            assert case["ms"][level]["count"] == 2
            assert case["share_of_probe"][level] > 0
            if not name.endswith((" maxima", ", encode")):
                assert all(ratio > 0 for ratio in case["times_faster"][level].values())
                assert case["times_faster"][level]
    assert jobs["mx32_e4m3, along features"]["times_faster"]["avx2"]["torchao"] > 0
    usual = quantize_rivals.eager
    monkeypatch.setattr(quantize, "eager", lambda *of: _with_another_bit(usual(*of)))
    with pytest.raises(CheckError, match="codes differ from those of torch's formula"):
        main(["--records", str(tmp_path), *arguments])
    assert "x torchao" not in capsys.readouterr().out


def _with_another_bit(rival: quantize_rivals.Rival) -> quantize_rivals.Rival:
    def wrong(values: torch.Tensor) -> quantize_rivals.Tensors:
        codes, table = rival.quantize(values)
        codes[0, 0] ^= 1
        return codes, table

    return quantize_rivals.Rival(wrong, rival.decode)


@pytest.mark.matrix("benchmarks")
def test_steps_of_optimizers_are_timed_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every side has its time; sides that end apart give none. The rank starts as in a record."""
    monkeypatch.setattr("benchmarks.launch.START_METHOD", "spawn")
    sizes = ["--ranks", "1", "--layers", "2", "--parameters", "3", "--numel", "16"]
    arguments = ["optimizer_step", *sizes, "--repeats", "2"]
    main(["--records", str(tmp_path), *arguments])
    assert "x FusedAdam" in capsys.readouterr().out
    results = _only_record(tmp_path)["results"]
    assert set(results["step_ms"]) == set(optimizer_step.SIDES)
    assert all(times["median"] > 0 for times in results["step_ms"].values())
    assert results["ratio_to_fused_adam"]["FusedAdam"] == 1
    sides = {}
    for name, value in (("FusedAdam", 1.0), ("other", 2.0)):
        model = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(model.weight, value)
        sides[name] = optimizer_step.Side(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckError, match="weights differ by"):
        optimizer_step.check(sides)


@pytest.mark.matrix("benchmarks")
def test_checkpoints_are_timed_beside_the_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saving, loading, blocking and planning have their times on every side."""
    sizes = ["--ranks", "2", "--layers", "1", "--hidden", "16", "--vocabulary", "32"]
    plan = ["--plan-tensors", "30", "--plan-world", "16", "--plan-repeats", "1"]
    main(["--records", str(tmp_path), "checkpoint", *sizes, "--repeats", "1", *plan])
    assert "of raw" in capsys.readouterr().out
    results = _only_record(tmp_path)["results"]
    for act in ("save", "load"):
        assert set(results[f"{act}_s"]) == set(checkpoint.SIDES) and results[f"{act}_of_raw"] > 0
    assert results["async"]["of_sync"] > 0
    assert results["plan"]["num_tensors"] == 30 and results["plan"]["num_chunks"] >= 30
    assert all(set(s) == {"local", "global"} for s in results["plan"]["seconds"].values())


@pytest.mark.gpu
@pytest.mark.skipif(cuda_module() is None, reason="CUDA kernels are off or not built")
def test_adam_is_timed_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same jobs with the CUDA kernels, beside a copy on the device."""
    arguments = ["adam", "--device", "cuda", "--numel", "50000", "--repeats", "3"]
    main(["--records", str(tmp_path), *arguments])
    assert "Adam on CUDA" in capsys.readouterr().out
    for case in _only_record(tmp_path)["results"]["50000 elements"].values():
        assert case["ms"]["megafsdp"]["count"] == 3 and case["probe_gb_per_s"] > 0
