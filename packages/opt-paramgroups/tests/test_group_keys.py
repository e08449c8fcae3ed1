"""Keys of groups read attributes of the meta or of the tensor; names and buffers of groups."""

import pytest
from grouped import BIAS, CONFIG, groups_of, names_in
from models import Experts, Model, mark
from torch import nn

from opt_config import OptimizerConfig, ParamKey
from opt_paramgroups import describe, get_param_groups, get_param_groups_and_buffers


def test_lr_mult_multiplies_both_rates():
    group = groups_of(Model(), {BIAS: {"lr_mult": 0.5}})["*.bias"]
    assert (group["lr"], group["max_lr"], group["min_lr"]) == (5e-3, 5e-3, 5e-5)


def test_a_false_role_wins_over_the_tensors_attribute():
    model = Model()
    metas = describe([model], overrides={"output.weight": {"is_embedding_or_output": False}})
    groups = get_param_groups([model], OptimizerConfig(lr=1.0, decoupled_lr=0.5), None, metas=metas)
    assert [names_in(group) for group in groups if group["is_decoupled_lr"]] == [["embedding.weight"]]


@pytest.mark.parametrize("attr", ["mine", "use_muon", "allreduce", "partition_stride"])
def test_unknown_attributes_match_only_tensors_that_have_them(attr):
    model = Model()
    mark(model.output.weight, **{attr: 1})
    assert names_in(groups_of(model, {ParamKey(attr=attr): {"max_lr": 1.0}})[attr]) == ["output.weight"]


def test_groups_are_filtered_and_buffers_numbered_by_chunk():
    class Wrapped(nn.Module):
        def __init__(self, module: nn.Module, expert_buffers: list[str]):
            super().__init__()
            self.module = module
            self.expert_parallel_buffers = expert_buffers

    chunks = [Wrapped(Experts(), ["a"]), Experts(), Wrapped(Experts(), ["b", "c"])]
    groups, buffers = get_param_groups_and_buffers(
        chunks, 3, CONFIG, {}, lambda group: group["is_expert_parallel"], "expert_parallel_buffers"
    )
    assert buffers == {3: ["a"], 5: ["b", "c"]}
    (group,) = groups
    assert {id.chunk for id in group["param_ids"]} == {3, 4, 5}
    assert all(id.name.startswith("experts.") for id in group["param_ids"])
