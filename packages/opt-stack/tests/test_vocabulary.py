"""Muon and the embeddings of stock torch models: the optimizer, the wrapper and the plan tell the same."""

import pytest
import torch
from processes import world_of_one
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_stack import DistributedDataParallel, get_optimizer

MUON = OptimizerConfig(optimizer="muon", lr=1e-2)


class Tagger(nn.Module):
    """An embedding, a hidden matrix, and a head that only its name tells: its shape is another than the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.hidden(self.tokens(x)))
        return out


def rules(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {str(id): group["optimizer"] for group in optimizer.param_groups for id in group["param_ids"]}


EXPECTED = {
    "tokens.weight": "adam",
    "hidden.weight": "muon",
    "hidden.bias": "adam",
    "head.weight": "adam",
    "head.bias": "adam",
}


def test_an_unmarked_model_gives_muon_its_hidden_matrices_only(caplog: pytest.LogCaptureFixture) -> None:
    assert rules(get_optimizer(MUON, [Tagger()])) == EXPECTED
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.getMessage() == (
        "parameter 'head.weight' of shape (3, 4) is treated as an embedding or output layer: it is called 'head'. "
        "It is updated by adam, not muon. Set its attribute is_embedding_or_output_parameter to True to confirm, or to "
        "False to treat it as a hidden matrix"
    )


@pytest.mark.parametrize(("rule", "answer"), [("muon", True), ("muon", False), ("adam", None)])
def test_no_warning_after_an_answer_or_with_a_single_rule(
    rule: str, answer: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = Tagger()
    if answer is not None:
        model.head.weight.is_embedding_or_output_parameter = answer  # type: ignore[assignment]
    optimizer = get_optimizer(OptimizerConfig(optimizer=rule, lr=1e-2), [model])
    assert rules(optimizer)["head.weight"] == ("muon" if answer is False else "adam")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_wrapped_and_torch_sharded_models_use_the_same_rules() -> None:
    layer_wise = OptimizerConfig(optimizer="muon", lr=1e-2, use_layer_wise_distributed_optimizer=True)
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with world_of_one():
        wrapped = DistributedDataParallel(sharded, Tagger(), optimizer_config=layer_wise)
        assert rules(get_optimizer(layer_wise, [wrapped])) == EXPECTED
        model = Tagger()
        fully_shard(model.hidden)
        fully_shard(model)
        assert rules(get_optimizer(MUON, [model])) == EXPECTED
        assert rules(get_optimizer(MUON, [nn.parallel.DistributedDataParallel(Tagger())])) == EXPECTED
