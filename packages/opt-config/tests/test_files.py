"""Configurations read from files: conversions of types that files lack, and refusals of invalid files."""

import json
import math

import pytest
import torch

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig, load_config, resolved
from opt_config.__main__ import main

TOML = """
seed = 1
[train.optimizer]
lr = 3e-4
min_lr = 3e-5
bf16 = true
params_dtype = "bfloat16"
use_precision_aware_optimizer = true
exp_avg_dtype = "float16"
clip_grad = 0.5
grad_norm_skip_threshold = inf
use_distributed_optimizer = true
overlap_param_gather = true
"""
FULL = OptimizerConfig(
    lr=3e-4,
    min_lr=3e-5,
    bf16=True,
    params_dtype=torch.bfloat16,
    use_precision_aware_optimizer=True,
    exp_avg_dtype=torch.float16,
    clip_grad=0.5,
    grad_norm_skip_threshold=math.inf,
    use_distributed_optimizer=True,
    overlap_param_gather=True,
)


def test_values_are_read_as_files_hold_them():
    for name, given, expected in (
        ("lr", "1e-4", 1e-4),  # as YAML reads 1e-4
        ("lr", 1, 1),
        ("lr", None, None),
        ("grad_norm_skip_threshold", "inf", math.inf),
        ("params_dtype", "torch.bfloat16", torch.bfloat16),
        ("params_dtype", "bf16", torch.bfloat16),
        ("optimizer", "x", "x"),
    ):
        assert getattr(OptimizerConfig.from_dict({name: given}), name) == expected
    patterns = {"param_name_patterns_for_fp32_local_accumulation": ["*.router"]}
    config = DistributedDataParallelConfig.from_dict(patterns)
    assert config.param_name_patterns_for_fp32_local_accumulation == ("*.router",)


def test_all_problems_of_a_file_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig.from_dict(
            {"adam_beta_1": 0.9, "colour": 1, "lr": "fast", "params_dtype": "bfloat", "timers": "t", "clip_grad": -1}
        )
    assert str(caught.value).splitlines() == [
        "OptimizerConfig: 6 problems",
        "  adam_beta_1=0.9: unknown field. Did you mean adam_beta1 or adam_beta2?",
        "  colour=1: unknown field.",
        "  lr='fast': must be a number or None",
        "  params_dtype='bfloat': must name a dtype: float32, fp32, float16, fp16, bfloat16, bf16, uint8, int8",
        "  timers='t': must be a callable, which a file cannot hold; set it in code",
        "  clip_grad=-1: must be at least 0 and finite",
    ]


def test_a_dict_is_read_back_as_it_was_written():
    """Dtypes of a rule's states became strings, so that the configuration was not equal to the one that was written."""
    dtypes = {"exp_avg_slow_dtype": torch.bfloat16, "exp_avg_dtype": torch.float8_e4m3fn, "z_dtype": "int8"}
    for config in (FULL, OptimizerConfig(optimizer_options={**dtypes, "alpha": 8.0})):
        assert OptimizerConfig.from_dict(config.to_dict()) == config
        assert OptimizerConfig.from_json(config.to_json()) == config


def test_an_8_bit_main_dtype_is_read_back():
    config = OptimizerConfig(bf16=True, use_precision_aware_optimizer=True, main_params_dtype=torch.int8)
    assert OptimizerConfig.from_json(config.to_json()) == config


def test_json_written_is_strict_json():
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    written = json.loads(FULL.to_json(), parse_constant=refuse)
    assert written["grad_norm_skip_threshold"] == "inf"
    assert written["params_dtype"] == "torch.bfloat16"


def test_a_callable_is_described_and_refused_on_the_way_back():
    config = OptimizerConfig(timers=print)
    assert config.to_dict()["timers"] == "callable <built-in function print>"
    with pytest.raises(ConfigError, match="must be a callable, which a file cannot hold"):
        OptimizerConfig.from_dict(config.to_dict())


def test_toml_is_read_from_a_section_and_json_from_a_file(tmp_path):
    toml = tmp_path / "run.toml"
    json_file = tmp_path / "run.json"
    toml.write_text(TOML)
    json_file.write_text(FULL.to_json())
    assert load_config(toml, section="train.optimizer") == load_config(str(json_file)) == FULL


TWICE = {  # file formats, and files in which a key is given twice
    "json": [(OptimizerConfig, '{"lr": 1e-3, "clip_grad": 1.0, "lr": 1e-5}', "lr"),
             (OptimizerConfig, '{"optimizer_options": {"alpha": 1, "alpha": 2}}', "alpha"),
             (DistributedDataParallelConfig, '{"bucket_size": 1, "bucket_size": 2}', "bucket_size")],
    "yaml": [(OptimizerConfig, "lr: 1e-3\nclip_grad: 1.0\n'lr': 1e-5\n", "lr"),
             (OptimizerConfig, "optimizer_options:\n  alpha: 1\n  alpha: 2\n", "alpha"),
             (DistributedDataParallelConfig, "{bucket_size: 1, bucket_size: 2}", "bucket_size")],
    "toml": [(OptimizerConfig, "lr = 1e-3\nlr = 1e-5", "")],
}  # fmt: skip
BY_FORMAT = [pytest.param(name, marks=[pytest.mark.needs_extra] * (name == "yaml")) for name in TWICE]


@pytest.mark.parametrize("form", BY_FORMAT)
def test_a_key_given_twice_is_refused(form):
    """Symptom: the last one won, so that a pasted block changed the learning rate without a word."""
    if form == "yaml":
        pytest.importorskip("yaml", reason="the yaml extra is not installed")
    for config, text, key in TWICE[form]:
        message = f"not valid {form.upper()}: " + (f"key '{key}' is given twice in one table; keep one" if key else "")
        with pytest.raises(ConfigError, match=f"^{message}"):
            getattr(config, f"from_{form}")(text)


@pytest.mark.needs_extra
def test_a_key_may_replace_that_of_a_merged_yaml_mapping():
    pytest.importorskip("yaml", reason="the yaml extra is not installed")
    merged = "optimizer_options: {alpha: 1.0, <<: {alpha: 2.0, beta3: 0.5}}"
    assert OptimizerConfig.from_yaml(merged).optimizer_options == {"alpha": 1.0, "beta3": 0.5}


ASSIGNED = {"json": '{{"{}": {}}}', "toml": "{} = {}", "yaml": "{}: {}"}
INFINITE = {"json": "Infinity", "toml": "inf", "yaml": ".inf"}


@pytest.mark.parametrize("form", BY_FORMAT)
def test_a_float_that_is_too_large_is_refused(form):
    """Symptom: grad_norm_skip_threshold = 1e400 became infinite, which never skips a step."""
    if form == "yaml":
        pytest.importorskip("yaml", reason="the yaml extra is not installed")
    read = getattr(OptimizerConfig, f"from_{form}")
    written = ASSIGNED[form]
    for value in ("1.0e+400", "-1.0e+400"):
        with pytest.raises(ConfigError, match=r"no float is as large as -?1.0e\+400"):
            read(written.format("grad_norm_skip_threshold", value))
    with pytest.raises(ConfigError, match="grad_norm_skip_threshold='1e400': must be a number"):
        OptimizerConfig.from_dict({"grad_norm_skip_threshold": "1e400"})
    assert read(written.format("grad_norm_skip_threshold", INFINITE[form])).grad_norm_skip_threshold == math.inf


@pytest.mark.needs_extra
def test_yaml_is_read_with_its_extra(tmp_path):
    pytest.importorskip("yaml", reason="the yaml extra is not installed")
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-4\nadam_eps: 1e-8\nbf16: true\nparams_dtype: bfloat16\nmin_lr: null\n")
    assert load_config(path) == OptimizerConfig(lr=1e-4, adam_eps=1e-8, bf16=True, params_dtype=torch.bfloat16)
    for text, number in (("1e-4", 1e-4), ("+1.E3", 1e3), ("-.5e1", -5.0), ("2e", "2e"), ("1.2.3e4", "1.2.3e4")):
        options = OptimizerConfig.from_yaml(f"optimizer: soap\noptimizer_options:\n  size: {text}\n").optimizer_options
        assert options == {"size": number}
    with pytest.raises(ConfigError, match="not valid YAML"):
        OptimizerConfig.from_yaml("lr: [")
    path = tmp_path / "run.yml"
    path.write_text("lr: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(path)


def test_yaml_without_its_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(ConfigError, match=r"^YAML needs the package pyyaml: python -m pip install pyyaml$"):
        OptimizerConfig.from_yaml("lr: 1")


def test_a_bad_file_is_refused_by_its_path(tmp_path):
    for name, text, section, message in (
        ("run.ini", b"", "", "unknown suffix '.ini'; allowed are .json, .toml, .yaml, .yml"),
        ("run.json", b"{", "", "not valid JSON: "),
        ("run.toml", b"lr =", "", "not valid TOML: "),
        ("run.toml", b"lr = 1 # \xff", "", "not UTF-8 text: "),
        ("run.json", b"[1]", "", "expected a table of fields, not [1]"),
        ("run.toml", b"[a]\nlr = 1", "a.b", "the file has no table 'a.b'"),
        ("run.toml", b"cilp_grad = 1", "", "OptimizerConfig: cilp_grad=1: unknown field. Did you mean clip_grad?"),
    ):
        path = tmp_path / name
        path.write_bytes(text)
        with pytest.raises(ConfigError) as caught:
            load_config(path, section=section)
        assert str(caught.value).startswith(f"{path}: {message}")


def test_the_resolved_configuration_is_plain_and_complete():
    said = json.loads(json.dumps(resolved(FULL)))
    assert said["config"] == FULL.to_dict()
    assert said["precision"]["remainder"] is True
    assert said["sharding"] == {"is": "FlatShards", "overlap_gather": True, "overlap_gather_with_step": False}
    assert said["loss_scaling"] == {"is": "NoScale"}
    assert said["placement"] == {"is": "OnDevice"}


def test_the_command_line_checks_a_file(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    assert main(["check", str(path), "--section", "train.optimizer"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["lr"] == 3e-4
    assert main(["check", str(path)]) == 1
    assert "seed=1: unknown field." in capsys.readouterr().err
    assert main(["check", str(tmp_path / "none.toml")]) == 1
