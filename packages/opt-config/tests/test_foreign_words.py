"""Words of other libraries: each is refused with what to write here instead, and hides no other problem."""

import dataclasses
import re

import pytest

from opt_config import (
    FOREIGN_WORDS,
    ConfigError,
    DistributedDataParallelConfig,
    OptimizerConfig,
    UnknownFieldError,
    foreign_value,
)

FIELDS = {field.name for field in dataclasses.fields(OptimizerConfig)}
WORDS = [word for word in FOREIGN_WORDS if "=" not in word]


def refusal(**values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(**values)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("word", WORDS)
def test_a_foreign_word_is_answered_in_every_spelling(word: str) -> None:
    assert word not in FIELDS
    for spelling in (word, word.replace("_", "-"), "--" + word.replace("_", "-"), word.upper()):
        assert refusal(**{spelling: 1}) == f"OptimizerConfig: {spelling}=1: unknown field; {FOREIGN_WORDS[word]}."


@pytest.mark.parametrize("word", FOREIGN_WORDS)
def test_an_answer_names_fields_that_exist(word: str) -> None:
    answer = FOREIGN_WORDS[word]
    wrapped = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    names = re.findall(r"\bset (\w+)|(\w+)=", answer)
    written = {name for pair in names for name in pair if name} - {"it"}
    assert written <= FIELDS | wrapped | {"DistributedDataParallelConfig"}, answer


VALUES: list[tuple[dict[str, object], str]] = [
    ({"loss_scale": 0}, "loss_scale=0: must be greater than 0 and finite; leave it out for dynamic loss scaling with"),
    ({"loss_scale": "dynamic"}, "loss_scale='dynamic': must be a number or None; leave it out for dynamic"),
    ({"fp16": {"enabled": True}}, "fp16={'enabled': True}: must be True or False; set fp16=True, and the section's"),
    ({"bf16": {"enabled": True}}, "bf16={'enabled': True}: must be True or False; set bf16=True"),
    ({"optimizer": {"type": "AdamW"}}, "optimizer={'type': 'AdamW'}: must be a string; set optimizer=\"adam\", lr, "),
    ({"optim": "adamw_torch_fused"}, "optim='adamw_torch_fused': unknown field; set optimizer=\"adam\"; steps are"),
    (
        {"optim": "adamw_bnb_8bit"},
        "optim='adamw_bnb_8bit': unknown field; set optimizer=\"adam\" and optimizer_options=",
    ),
    ({"optim": "lion"}, "optim='lion': unknown field; set optimizer."),
    ({"clip-grad": 1.0}, "clip-grad=1.0: unknown field; write clip_grad."),
    ({"--adam-beta1": 1.0}, "--adam-beta1=1.0: unknown field; write adam_beta1."),
]


@pytest.mark.parametrize(("given", "message"), VALUES, ids=lambda value: str(value)[:40])
def test_a_foreign_value_is_answered(given: dict[str, object], message: str) -> None:
    assert refusal(**given).startswith(f"OptimizerConfig: {message}")


def test_other_values_have_no_answer() -> None:
    assert foreign_value("loss_scale", 1.0) == foreign_value("optimizer", "adam") == foreign_value("lr", {}) == ""


DEEPSPEED: dict[str, object] = {
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "adam_beta1": 5,
    "lr": 1e-3,
}


def test_an_unknown_field_hides_no_other_problem() -> None:
    """Of a DeepSpeed dict, the two unknown sections were reported, and then the other two."""
    message = refusal(**DEEPSPEED)
    assert message.startswith("OptimizerConfig: 5 problems\n")
    for name in ("zero_optimization", "gradient_clipping", "fp16", "optimizer", "adam_beta1"):
        assert f"\n  {name}=" in message
    with pytest.raises(UnknownFieldError) as caught:
        OptimizerConfig(1e-3, foo=1, clip_grad=-1.0)  # type: ignore[call-arg]
    assert [problem.field for problem in caught.value.problems] == ["foo", "clip_grad"]
