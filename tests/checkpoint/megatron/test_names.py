"""Names go from Megatron-LM's form to ours and back, whatever the layer."""

from __future__ import annotations

import pytest

from megafsdp.checkpoint.megatron.names import (
    TheirKey,
    TheirNames,
    group_member,
    group_members,
    joined_parts,
    place_in_stack,
    read_key,
)
from megafsdp.errors import CheckpointError

_LAYER = "decoder.layers.3"
_MLA = f"{_LAYER}.self_attention"
_NAMES = frozenset(
    {
        f"{_LAYER}.input_layernorm.weight",
        f"{_MLA}.linear_qkv.weight",
        f"{_LAYER}.pre_mlp_layernorm.weight",
        f"{_LAYER}.mlp.linear_fc1.weight",
        "decoder.layers.4.input_layernorm.weight",
        "decoder.layers.4.self_attention.in_proj.weight",
        "decoder.layers.4.pre_mlp_layernorm.weight",
        "decoder.layers.4.mlp.experts.linear_fc1.weight7",
        "decoder.layers.4.mlp.experts.local_experts.7.linear_fc1.weight_w",
        "decoder.layers.5.self_attention.linear_q_up_proj.weight",
        "decoder.layers.5.self_attention.q_layernorm.weight",
        "decoder.layers.6.self_attention.q_layernorm.weight",
        "decoder.layers.7.input_layernorm.weight",
        "decoder.layers.7.self_attention.linear_qkv_down_proj.weight",
        "decoder.layers.7.self_attention.kv_layernorm.weight",
        "decoder.layers.7.self_attention.linear_kv_up_proj.weight",
        "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight",
        "embedding.word_embeddings.weight",
    }
)


@pytest.mark.parametrize("impl", ["transformer_engine", "local"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("name", sorted(_NAMES))
def test_every_name_comes_back(name: str, precision: str, impl: str) -> None:
    """Weights, states and group fields of any layer are found again under the same name."""
    names = TheirNames(_NAMES, precision, impl)
    wrappers = "module." * (3 if precision == "bf16" else 2)
    model, state = ".".join(names.model_key(name)), ".".join(names.state_key(name, "exp_avg"))
    group = ".".join(names.group_key(name, "lr"))
    assert model.startswith("model.module.") and not model.startswith("model.module.module.")
    assert state.startswith(f"optimizer.state.{wrappers}") and state.endswith(".exp_avg")
    assert group.startswith(f"optimizer.param_to_group_meta.{wrappers}")
    assert not state.startswith(f"optimizer.state.{wrappers}module.")
    assert read_key(model) == TheirKey("model", name)
    assert read_key(state) == TheirKey("state", name, "exp_avg")
    assert read_key(group) == TheirKey("group", name, "lr")


@pytest.mark.parametrize(
    ("name", "on_disk"),
    [
        (f"{_LAYER}.input_layernorm.weight", f"{_MLA}.linear_qkv.layer_norm_weight"),
        (f"{_LAYER}.pre_mlp_layernorm.weight", f"{_LAYER}.mlp.linear_fc1.layer_norm_weight"),
        (
            "decoder.layers.4.input_layernorm.weight",
            "decoder.layers.4.self_attention.in_proj.layer_norm_weight",
        ),
        # A layer of experts has no linear map that could hold the norm.
        ("decoder.layers.4.pre_mlp_layernorm.weight", "decoder.layers.4.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.5.self_attention.q_layernorm.weight",
            "decoder.layers.5.self_attention.linear_q_up_proj.layer_norm_weight",
        ),
        (
            "decoder.layers.7.self_attention.kv_layernorm.weight",
            "decoder.layers.7.self_attention.linear_kv_up_proj.layer_norm_weight",
        ),
        (
            "decoder.layers.7.input_layernorm.weight",
            "decoder.layers.7.self_attention.linear_qkv_down_proj.layer_norm_weight",
        ),
        # The norm of single heads stays a layer of its own.
        (
            "decoder.layers.6.self_attention.q_layernorm.weight",
            "decoder.layers.6.self_attention.q_layernorm.weight",
        ),
        (
            "mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight",
            "mtp.layers.0.transformer_layer.mlp.linear_fc2.weight",
        ),
    ],
)
def test_transformer_engine_holds_norms_in_linear_maps(name: str, on_disk: str) -> None:
    """Only a norm whose linear map exists is renamed; ``local`` renames none."""
    names = TheirNames(_NAMES, "bf16", "transformer_engine")
    assert names.model_key(name) == ("model", f"module.{on_disk}")
    if "layernorm" in name:
        local = TheirNames(_NAMES, "bf16", "local")
        assert local.model_key(name) == ("model", f"module.{name}")


def test_groups_name_the_inner_layer_as_the_module_does() -> None:
    """Megatron-LM renames the inner layer of multi-token prediction in weights and states only."""
    names = TheirNames(_NAMES, "fp32", "local")
    key = names.group_key("mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight", "eps")
    assert key[2] == "module.module.mtp.layers.0.mtp_model_layer.mlp.linear_fc2.weight"


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("args", "common"),
        ("rng_state.(0, 0).0.np_rng_state", "common"),
        ("opt_param_scheduler.max_lr", "common"),
        ("model.module.decoder.layers.0.mlp.linear_fc1._extra_state", "dropped"),
        ("model.module.decoder.layers.0.mlp.linear_fc1._extra_state.recipe", "dropped"),
        ("rerun_state_machine.mode", "dropped"),
        ("model0.module.decoder.final_layernorm.weight", None),
        ("optimizer.param_groups.0.lr", "numbered"),
        ("optimizer.1.optimizer.param_groups.0.params.3", "numbered"),
        ("optimizer.param_groups", None),
        ("argsx", None),
    ],
)
def test_other_keys_are_told_apart(key: str, kind: str | None) -> None:
    """Common values, what is dropped, and what is unknown."""
    found = read_key(key)
    assert (found.kind if found else None) == kind


def test_a_name_for_all_experts_stands_for_each_and_for_nothing_else() -> None:
    """Modules within an expert, and experts of other layers, have names of their own."""
    at = "a.experts.local_experts"
    names = [f"{at}.{end}" for end in ("0.fc.weight", "12.fc.weight", "0.inner.fc.weight")]
    names.append("b.experts.local_experts.0.fc.weight")
    assert group_member(names[1]) == f"{at}.*.fc.weight"
    assert group_members(f"{at}.*.fc.weight", names) == names[:2]
    assert group_members("a.b", names) == ["a.b"]


def test_parts_are_found_in_their_order() -> None:
    """SwiGLU, GDN and its sister layer, and MLA where its group names the fused parameter."""
    gdn = [f"a.in_proj.weight.{part}" for part in ("alpha", "beta", "z", "value", "key", "query")]
    kda = [f"b.in_proj.weight.{part}" for part in ("gate", "g", "value", "key", "query")]
    conv = [f"a.conv1d.bias.{part}" for part in ("value", "key", "query")]
    experts = ["e.experts.linear_fc1.weight12_v", "e.experts.linear_fc1.weight12_w"]
    mla = ["m.linear_kv_down_proj.weight", "m.linear_q_down_proj.weight"]
    names = {*gdn, *kda, *conv, *experts, *mla, "x.linear_fc2.weight_w", "y.key"}
    found = joined_parts(names, ["m.linear_qkv_down_proj.weight"])
    assert {whole: [p.removeprefix(whole) for p in parts] for whole, parts in found.items()} == {
        "a.in_proj.weight": [".query", ".key", ".value", ".z", ".beta", ".alpha"],
        "b.in_proj.weight": [".query", ".key", ".value", ".g", ".gate"],
        "a.conv1d.bias": [".query", ".key", ".value"],
        "e.experts.linear_fc1.weight12": ["_w", "_v"],
        "m.linear_qkv_down_proj.weight": mla[::-1],
    }
    assert "m.linear_qkv_down_proj.weight" not in joined_parts(names, ["m.linear_q_down_proj"])


@pytest.mark.parametrize(
    "names",
    [
        "in_proj.weight: query key value z f b w",
        "in_proj.weight: query key value",
        "in_proj.weight: z x B C dt",
        "conv1d.weight: x B C",
        "conv1d.bias: query key value",
    ],
)
def test_kinds_of_layers_differ_by_their_parts(names: str) -> None:
    """Variants of the gated delta net, and Mamba, of which some parts have the same names."""
    leaf, _, ends = names.partition(": ")
    parts = tuple(f"a.{leaf}.{end}" for end in ends.split())
    assert joined_parts(set(parts), []) == {f"a.{leaf}": parts}


def test_a_missing_part_is_named() -> None:
    """A gate without its value, a fused layer without one of its projections."""
    with pytest.raises(CheckpointError, match=r"1 missing: a\.linear_fc1\.bias_v"):
        joined_parts({"a.linear_fc1.bias_w"}, [])
    with pytest.raises(CheckpointError, match=r"in_proj\.weight\.alpha"):
        joined_parts({f"a.in_proj.weight.{p}" for p in ("query", "key", "value", "z", "beta")}, [])
    unknown = {f"a.in_proj.weight.{p}" for p in ("query", "key", "value", "f_a", "beta")}
    with pytest.raises(CheckpointError, match=r"unknown parts a\.in_proj\.weight\.f_a.*support"):
        joined_parts(unknown, [])


@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize(
    ("leaf", "grouped", "sequential"),
    [
        ("linear_fc1.weight_w", "linear_fc1.weight{}_w", "local_experts.{}.linear_fc1.weight_w"),
        ("linear_fc1.weight", "linear_fc1.weight{}", "local_experts.{}.linear_fc1.weight"),
        ("linear_fc2.weight", "linear_fc2.weight{}", "local_experts.{}.linear_fc2.weight"),
    ],
)
def test_a_stack_is_a_tensor_for_each_expert(
    leaf: str, grouped: str, sequential: str, is_grouped: bool
) -> None:
    """Numbered in a grouped layer, in modules of their own in a sequential one; both come back."""
    at = f"{_LAYER}.mlp.experts"
    names = TheirNames(_NAMES, "bf16", "local", {f"{at}.{leaf}": 12}, is_grouped)
    found = names.of_experts(f"{at}.{leaf}")
    form = grouped if is_grouped else sequential
    assert found == [f"{at}.{form.format(index)}" for index in range(12)]
    assert [place_in_stack(name) for name in found] == [(f"{at}.{leaf}", i) for i in range(12)]


@pytest.mark.parametrize(
    "name",
    [
        f"{_LAYER}.mlp.shared_experts.linear_fc1.weight",
        f"{_LAYER}.mlp.linear_fc1.weight_w",
        f"{_LAYER}.mlp.experts.linear_fc1.weight",
        f"{_LAYER}.mlp.experts.local_experts.7.linear_fc1.bias",
        f"{_LAYER}.mlp.router.weight",
    ],
)
def test_other_tensors_are_no_experts(name: str) -> None:
    """Shared experts, dense layers, stacks themselves and biases stay as they are."""
    names = TheirNames(_NAMES, "bf16", "local", {}, True)
    assert place_in_stack(name) is None
    assert names.of_experts(name) == [name]
