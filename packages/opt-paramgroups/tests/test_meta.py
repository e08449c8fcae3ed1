"""ParamMeta: read from attributes and placements, or given by the caller; refused if it does not fit the shape."""

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from models import Experts, Model, mark
from processes import world_of_one
from torch import nn

from opt_config import ConfigError
from opt_paramgroups import MeshPlacement, ParamId, describe, is_dtensor


def meta_of(shape, name="weight", **attributes):
    model = nn.Module()
    *path, last = name.split(".")
    holder = model
    for step in path:
        holder.add_module(step, nn.Module())
        holder = holder.get_submodule(step)
    holder.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    mark(holder.get_parameter(last), **attributes)
    return describe([model])[ParamId(0, name)]


TP = {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 2}
NO_TP = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}
ATTRIBUTES = [
    ({}, {"is_expert": False, "tensor_parallel": False, "partition_dim": None}),
    ({"allreduce": False}, {"is_expert": True, "expert_tp": True}),
    ({"allreduce": True}, {"is_expert": False, "expert_tp": False}),
    ({"shared": True}, {"shared": True}),
    ({"shared_embedding": True}, {"shared_embedding": True, "is_on_several_stages": True}),
    ({"shared_position_embedding": True}, {"shared_position_embedding": True, "is_on_several_stages": True}),
    ({"pipeline_parallel": True}, {"pipeline_parallel": True, "is_on_several_stages": True}),
    (TP, {"tensor_parallel": True, "partition_dim": 1, "partition_stride": 2}),
    (NO_TP, {"tensor_parallel": False, "partition_dim": None, "partition_stride": 1}),
    ({"sequence_parallel": True}, {"sequence_parallel": True}),
    ({"average_gradients_across_tp_domain": True}, {"average_gradients_across_tp": True}),
    ({"is_embedding_or_output_parameter": True},
     {"is_embedding_or_output": True, "is_embedding": False, "moved_as_matrix": False}),
    ({"is_embedding_parameter": True}, {"is_embedding": True}),
    ({"use_muon": False}, {"use_muon": False, "moved_as_matrix": False}),
    ({"grad_norm_group": "mtp"}, {"grad_norm_group": "mtp"}),
    ({"qkv_split_shapes": [2, 1, 1]}, {"qkv_split_shapes": (2, 1, 1)}),
    ({"split_rows": [1, 1]}, {"split_rows": (1, 1)}),
    ({"head_rows": [2, 2]}, {"head_rows": (2, 2)}),
    ({"is_qkv": True, "qkv_split_shapes": [2, 1, 1]}, {"qkv_split_shapes": (2, 1, 1)}),
    ({"is_qkv": False, "qkv_split_shapes": [2, 1, 1]}, {"qkv_split_shapes": ()}),
]  # fmt: skip


@pytest.mark.parametrize(("attributes", "expected"), ATTRIBUTES)
def test_megatron_cores_attributes_are_read(attributes, expected):
    meta = meta_of((4, 6), **attributes)
    assert {field: getattr(meta, field) for field in expected} == expected


def test_shapes_and_dtypes_are_the_tensors():
    model = nn.Linear(3, 5).to(torch.bfloat16)
    metas = describe([model])
    weight = metas[ParamId(0, "weight")]
    bias = metas[ParamId(0, "bias")]
    assert (weight.shape, weight.local_shape, weight.numel, weight.dtype) == ((5, 3), (5, 3), 15, torch.bfloat16)
    assert (weight.moved_as_matrix, bias.moved_as_matrix) == (True, False)
    assert not weight.is_dtensor


def test_expert_tensor_parallelism_follows_from_the_name():
    names = ("experts.0.weight", "shared_experts.weight", "mlp.weight")
    assert [meta_of((2, 2), name).expert_tp for name in names] == [True, False, False]


def test_ids_have_the_chunk_and_leave_out_frozen_parameters():
    chunks = [Experts(), Model(num_layers=1)]
    chunks[1].output.requires_grad_(False)
    ids = list(describe(chunks, model_chunk_offset=2))
    assert ids[:2] == [ParamId(2, "router.weight"), ParamId(2, "router.bias")]
    assert ParamId(3, "embedding.weight") in ids
    assert ParamId(3, "output.weight") not in ids
    assert str(ParamId(3, "a")) == "chunk 3: a"
    assert str(ParamId(0, "a")) == "a"


def test_the_caller_may_know_better():
    model = Model(num_layers=2)
    metas = describe(
        [model],
        overrides={
            "*.linear_qkv.weight": {"qkv_split_shapes": (2, 1, 1)},
            ParamId(0, "layers.1.attention.linear_qkv.weight"): {"qkv_split_shapes": ()},
            "output.weight": {"is_embedding_or_output": False, "is_expert": True},
        },
    )
    assert metas[ParamId(0, "layers.0.attention.linear_qkv.weight")].qkv_split_shapes == (2, 1, 1)
    assert metas[ParamId(0, "layers.1.attention.linear_qkv.weight")].qkv_split_shapes == ()
    output = metas[ParamId(0, "output.weight")]
    assert (output.is_embedding_or_output, output.is_expert, output.moved_as_matrix) == (False, True, True)


QKV = "qkv_split_shapes"
NORM = "layers.0.norm.weight"


REFUSED = [
    ({"output.wieght": {"shared": True}}, "overrides['output.wieght']: no trainable parameter has this name. Did"),
    ({ParamId(1, "output.weight"): {"shared": True}}, "overrides['chunk 1: output.weight']: no trainable paramete"),
    ({"output.weight": {"is_expret": True}}, "overrides['output.weight']: unknown role 'is_expret'; allowed are i"),
    ({"output.weight": {QKV: 3}}, "overrides['output.weight']: qkv_split_shapes=3: must be a tuple of numbers of"),
    ({"output.weight": {"partition_dim": 2}}, "output.weight: partition_dim=2 of shape (7, 4): must be in [0, 2)"),
    ({"output.weight": {QKV: (2, 1, 1)}}, "output.weight: qkv_split_shapes=(2, 1, 1) of shape (7, 4): must be pos"),
    ({NORM: {QKV: (2, 1, 1)}}, f"{NORM}: qkv_split_shapes=(2, 1, 1) of shape (4,): must be positive numbers whose"),
    ({"output.weight": {"head_rows": 2}}, "output.weight: head_rows=2 of shape (7, 4): must be positive numbers w"),
    ({"output.weight": {"head_rows": 7.0}}, "output.weight: head_rows=7.0 of shape (7, 4): must be positive numbers w"),
    ({"output.weight": {"head_rows": True}}, "output.weight: head_rows=True of shape (7, 4): must be positive numbers"),
    ({NORM: {"head_rows": 2}}, f"{NORM}: head_rows=2 of shape (4,): must be positive numbers whose sum divides th"),
    ({"output.weight": {"split_sizes": (3, 3)}}, "output.weight: split_sizes=(3, 3) of shape (7, 4): must be posi"),
    ({"output.weight": {"head_rows": (2, 3)}}, "output.weight: head_rows=(2, 3) of shape (7, 4): must be positive n"),
    ({"output.weight": {"split_rows": (1, 1)}}, "output.weight: split_rows=(1, 1) of shape (7, 4): must be positive"),
    ({"output.weight": {"split_rows": (7, 0)}}, "output.weight: split_rows=(7, 0) of shape (7, 4): must be positive"),
    ({"output.weight": {"split_rows": 7}}, "overrides['output.weight']: split_rows=7: must be a tuple of numbers of"),
    ({NORM: {"split_rows": (1, 1)}}, f"{NORM}: split_rows=(1, 1) of shape (4,): must be positive numbers whose sum"),
    ({"output.weight": {"split_sizes": (3, 4), "head_rows": 7}}, "output.weight: head_rows=7 and split_sizes=(3,"),
]


def test_what_cannot_be_is_refused():
    for overrides, message in REFUSED:
        with pytest.raises(ConfigError) as caught:
            describe([Model()], overrides=overrides)
        assert str(caught.value).startswith(message)


# --- DTensors: a world of one process suffices for placements ------------------------------


@pytest.fixture
def mesh() -> Iterator[object]:
    from torch.distributed.device_mesh import init_device_mesh

    with world_of_one():
        yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))


def test_placements_are_read_as_plain_values(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0), Shard(1)]))
    model.other = nn.Parameter(distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0), Replicate()]))
    metas = describe([model])
    weight = metas[ParamId(0, "weight")]
    other = metas[ParamId(0, "other")]
    assert weight.placements == (MeshPlacement("dp", 1, 0), MeshPlacement("tp", 1, 1))
    assert (weight.is_dtensor, weight.tensor_parallel, weight.partition_dim) == (True, True, 1)
    assert other.placements == (MeshPlacement("dp", 1, 0), MeshPlacement("tp", 1, None))
    assert (other.tensor_parallel, other.partition_dim) == (False, None)


def test_a_partial_placement_is_refused(mesh):
    from torch.distributed.tensor import DTensor, Partial, Replicate

    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Partial(), Replicate()], run_check=False))
    with pytest.raises(ConfigError, match="allowed are Shard and Replicate; redistribute it first"):
        describe([model])


def test_a_dtensor_module_that_is_being_imported_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("torch.distributed.tensor"))
    assert not is_dtensor(torch.ones(2))


def attention(rows, name="linear_qkv", inner=None, **fields):
    """A model whose configuration says how the rows of its fused projection belong to heads."""
    model = nn.Module()
    model.config = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=3, **fields)
    layer = nn.Module()
    layer.config = inner
    layer.add_module(name, nn.Linear(5, rows))
    model.attention = layer
    return model


GATED = {"attention_output_gate": True}
NARROW = SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=2)
QKV_ROWS = {
    "of the model's configuration": (attention(24), (6, 3, 3)),
    "of the layer's": (attention(16, inner=NARROW), (4, 2, 2)),
    "one tensor-parallel part": (attention(12), (6, 3, 3)),
    "with an output gate": (attention(36, **GATED), (6, 6, 3, 3)),
    "rows that do not divide": (attention(18), ()),
    "latent attention": (attention(24, name="linear_kv_up_proj"), ()),
    "another configuration": (attention(24, inner=SimpleNamespace(hidden_size=5)), (6, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("model", "rows"), QKV_ROWS.values(), ids=QKV_ROWS)
def test_rows_of_fused_qkv_are_found_in_the_configuration(model, rows):
    """Muon took the fused matrix of Megatron's models as one: losses were 1.3e-2 off within 20 steps."""
    wrapped = nn.Module()
    wrapped.module = model
    metas = describe([wrapped])
    assert {meta.qkv_split_shapes for id, meta in metas.items() if id.name.endswith("weight")} == {rows}
    assert metas[next(id for id in metas if id.name.endswith("bias"))].qkv_split_shapes == ()


def test_attributes_of_fused_qkv_win_over_the_configuration():
    for attributes, rows in (
        ({"is_qkv": False}, (6, 3, 3)),  # as Megatron-Core makes every matrix
        ({"qkv_split_shapes": (4, 2)}, (4, 2)),
        ({"head_rows": 8}, ()),
    ):
        model = attention(24)
        mark(model.attention.linear_qkv.weight, **attributes)
        assert describe([model])[ParamId(0, "attention.linear_qkv.weight")].qkv_split_shapes == rows


def test_a_model_may_define_parameters_without_arguments():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = nn.Linear(2, 2)

        def parameters(self):
            return (param for param in super().parameters() if param.requires_grad)

    assert len(describe([Frozen()])) == 4
