"""Directories that Megatron-Core wrote, kept in `golden/`: read, resharded, converted without Megatron installed.

They are from `tests_megatron/write_megatron.py` on two ranks; `tests_megatron` runs the tests of `written` on new ones.
"""

import argparse
import hashlib
import itertools
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_ranks import load_as_ranks
from megatron_truth import assert_holds, truth_of
from small_models import train, trained
from states import whole_tensors
from torch import nn

from opt_checkpoint import (
    NUMPY_GLOBALS,
    REFERENCE_ALIASES,
    BucketSlot,
    CheckpointCorruptError,
    CheckpointingException,
    CheckpointKeyError,
    CheckpointValueError,
    NotLoaded,
    ShardedObject,
    ShardedTensor,
    load,
    load_optimizer,
    read_common,
    read_index,
    sharded_like,
    verify_checkpoint,
)
from opt_checkpoint.__main__ import main
from opt_checkpoint.convert.megatron import megatron_to_checkpoint, read_step
from opt_checkpoint.disk.index import Kind

GOLDEN = Path(__file__).parent / "golden"
FORMS = {"megatron-0.16.1": "fully_reshardable", "megatron-0.12.3": "fully_sharded_model_space"}
FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture(params=FORMS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the directory and the truth about it."""
    path = GOLDEN / f"{request.param}.zip"
    if not path.exists():
        pytest.skip("a source distribution has no checkpoints of Megatron-Core")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path)
    (tmp_path / FORMS[request.param]).rename(tmp_path / "theirs")
    return tmp_path


def test_a_directory_of_megatron_holds_what_its_optimizer_held(written: Path) -> None:
    assert read_index(written / "theirs").kind is Kind.MEGATRON
    assert verify_checkpoint(written / "theirs") == []
    truth = truth_of(written)
    assert len(truth) == 3 * 13
    assert_holds(written / "theirs", truth, aliases=REFERENCE_ALIASES)


@pytest.mark.parametrize("size", [3, 4])
def test_it_loads_as_flat_shards_of_any_number_of_ranks(written: Path, size: int) -> None:
    key = f"optimizer.state.exp_avg.{FC1}"
    whole = truth_of(written)[key]
    cuts = [whole.numel() * n // size for n in range(size + 1)]
    block = ShardedTensor.from_rank_offsets(key, whole)
    states = [{"w": block.flat(torch.zeros(b - a), a, b)} for a, b in itertools.pairwise(cuts)]
    loaded = load_as_ranks(states, written / "theirs")
    assert torch.equal(torch.cat([state["w"] for state in loaded]), whole.reshape(-1))


def test_values_load_where_their_classes_are_plain_or_allowed(written: Path) -> None:
    path = written / "theirs"
    weight = torch.zeros(2, 64, 16, dtype=torch.bfloat16)
    assert load({"model": sharded_like(FC1, weight), "iteration": None}, path).state["iteration"] == 3
    assert weight.count_nonzero() == weight.numel()
    common = read_common(read_index(path))
    assert common["args"] == NotLoaded("argparse.Namespace")
    groups = load({"optimizer": {"optimizer": {"param_groups": None}}}, path).state["optimizer"]["optimizer"]
    assert groups["param_groups"][0]["max_lr"] == 0.01
    assert read_step(read_index(path), common) == 3
    with pytest.raises(CheckpointCorruptError, match=r"args cannot be loaded safely.*safe_globals=\[.*Namespace"):
        load({"args": None}, path)
    allowed: list[Any] = [argparse.Namespace, *((dict, f"{m}.Attention") for m in ("__mp_main__", "__main__"))]
    with pytest.raises(CheckpointCorruptError):  # an enum's member is not a dict
        load({"args": None}, path, safe_globals=allowed)
    allowed = [argparse.Namespace, *((str, f"{m}.Attention") for m in ("__mp_main__", "__main__"))]
    arguments = load({"args": None}, path, safe_globals=allowed).state["args"]
    assert (arguments.lr, arguments.attention, arguments.dtype) == (0.01, "1", torch.bfloat16)
    shards = 2 if "rng_state/shard_1_2" in read_index(path).objects else 1
    rng = ShardedObject("rng_state", None, (shards,), (0,))
    with pytest.raises(CheckpointCorruptError, match="NUMPY_GLOBALS of opt_checkpoint has those of numpy"):
        load({"rng": rng}, path)
    (generators,) = load({"rng": rng}, path, safe_globals=NUMPY_GLOBALS).state["rng"]
    assert generators["numpy"][1].shape == (624,)


def test_it_is_converted_with_its_step(written: Path) -> None:
    assert main(["convert", str(written / "theirs"), str(written / "ours"), "--from", "megatron"]) == 0
    assert_holds(written / "ours", truth_of(written))
    assert verify_checkpoint(written / "ours") == []
    assert load({"iteration": None}, written / "ours").state["iteration"] == 3
    steps = whole_tensors(written / "ours", "optimizer.state.step.")
    assert len(steps) == 13
    assert steps[f"optimizer.state.step.{FC1}"].tolist() == [3, 3]
    assert steps["optimizer.state.step.embedding.word_embeddings.weight"].tolist() == 3
    with pytest.raises(CheckpointValueError, match="it is not dp_reshardable"):
        megatron_to_checkpoint(written / "theirs", written / "again", slots=[])
    with pytest.raises(SystemExit):
        main(["convert", str(written / "theirs"), str(written / "again")])


def shifted(states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """States as Megatron-Core up to 0.19.2 cuts them from two buckets: without the padding after the first one."""
    names = list(reversed(states))  # as it fills buckets
    starts: dict[str, int] = {}
    end = 0
    for name in names:
        starts[name] = end
        end += states[name].numel() + (24 if name == names[0] else 0)
    joined = torch.cat([states[name].reshape(-1) for name in names])
    cut = torch.cat([joined, torch.zeros(24)])
    return {n: cut[starts[n] : starts[n] + s.numel()].reshape(s.shape) for n, s in states.items()}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embedding": (40, 12), "norm": (16,), "fc1": (30, 12), "bias": (10,), "head": (40, 12)}
    return {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}


def write_mains(path: Path, weights: Any, mains: Any, moments: Any, main: str = "param") -> None:
    tensors = {**weights, **{f"optimizer.state.{main}.{name}": value for name, value in mains.items()}}
    write(path, {**tensors, **{f"optimizer.state.exp_avg.{name}": value for name, value in moments.items()}})


def as_fp8(main: torch.Tensor) -> torch.Tensor:
    scale = main.abs().max() / 448
    return ((main / scale).to(torch.float8_e4m3fn).float() * scale).bfloat16()


def as_rounded_stochastically(main: torch.Tensor) -> torch.Tensor:
    noise = torch.randint(0, 1 << 16, main.shape, generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    return ((main.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32).bfloat16()


def as_fp16_main(main: torch.Tensor) -> torch.Tensor:
    scale = main.abs().max() / 65504
    return (main / scale).half().float() * scale


HEALTHY: dict[str, tuple[Any, Any]] = {  # the weights and main weights that are stored for exact main weights
    "bf16": (lambda name, main: main.bfloat16(), lambda main: main),
    "fp16": (lambda name, main: main.half(), lambda main: main),
    "fp8": (lambda name, main: as_fp8(main) if main.dim() > 1 else main.bfloat16(), lambda main: main),
    "stochastic rounding": (lambda name, main: as_rounded_stochastically(main), lambda main: main),
    "fp16 main weights": (lambda name, main: main.bfloat16(), as_fp16_main),
    "weights loaded later": (lambda name, main: drawn(7)[name].bfloat16(), lambda main: main),
    "some loaded later": (lambda name, main: (drawn(7)[name] if "fc" in name else main).bfloat16(), lambda main: main),
    "fp32": (lambda name, main: main, lambda main: main),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_states_of_healthy_runs_are_not_refused(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    to_weight, to_main = HEALTHY[name]
    mains = drawn(1)
    path = tmp_path / "theirs"
    weights = {name: to_weight(name, main) for name, main in mains.items()}
    write_mains(path, weights, {name: to_main(main) for name, main in mains.items()}, drawn(2))
    assert main(["verify", str(path)]) == 0
    assert ("states of 5 parameters cannot be checked" in capsys.readouterr().out) == (name == "fp32")
    moment = torch.zeros(30, 12)
    load({"x": sharded_like("optimizer.state.exp_avg.fc1", moment)}, path)
    assert torch.equal(moment, drawn(2)["fc1"])


@pytest.mark.parametrize("form", ["param", "fp32_param"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_shifted_states_are_named_and_refused(tmp_path: Path, dtype: torch.dtype, form: str) -> None:
    mains = drawn(1)
    path = tmp_path / "theirs"
    weights = {name: main.to(dtype) for name, main in mains.items()}
    write_mains(path, weights, shifted(mains), shifted(drawn(2)), main=form)
    (finding,) = verify_checkpoint(path)
    assert finding.keys == tuple(f"optimizer.state.{form}.{name}" for name in ("bias", "embedding", "fc1", "norm"))
    target = torch.full((30, 12), -1.0)
    asked: dict[str, Any] = {"x": sharded_like("optimizer.state.exp_avg.fc1", target)}
    with pytest.raises(CheckpointCorruptError, match=r"states of 4 parameters at shifted places .*moments='new'"):
        load(asked, path)
    assert (target == -1).all()
    model = nn.ParameterDict({name: nn.Parameter(main.clone()) for name, main in mains.items()})
    with pytest.raises(CheckpointCorruptError, match="at shifted places"):
        load_optimizer(model, torch.optim.AdamW(model.parameters()), path)
    command = ["convert", str(path), str(tmp_path / "ours"), "--from", "megatron"]
    assert main(command) == 2
    assert main([*command, "--moments", "new"]) == 0
    assert set(read_index(tmp_path / "ours").tensors) == set(mains)
    load({"x": sharded_like("fc1", torch.zeros(30, 12, dtype=dtype))}, path)  # weights are right
    asked["main"] = sharded_like("optimizer.state.fp32_param.fc1", torch.zeros(30, 12))
    report = load(asked, path, moments="new", strict="return_missing")
    assert report.missing == ("optimizer.state.exp_avg.fc1",)
    assert torch.equal(report.state["main"], weights["fc1"].float())


STATES = ("param", "exp_avg", "exp_avg_sq")
# Two tensor-parallel ranks, each with two buckets: of `w` half the columns each, a bias that both have, a matrix.
SLOTS = [
    BucketSlot(name="w", shape=(4, 3), start=64, group=0, global_shape=(4, 6), global_offset=(0, 0)),
    BucketSlot(name="w", shape=(4, 3), start=64, group=1, global_shape=(4, 6), global_offset=(0, 3)),
    BucketSlot(name="b", shape=(50,), start=0),
    BucketSlot(name="b2", shape=(50,), start=0, group=1),
    BucketSlot(name="top", shape=(2, 5), start=0, bucket=1, global_shape=(4, 5), global_offset=(0, 0)),
    BucketSlot(name="top", shape=(2, 5), start=0, bucket=1, group=1, global_shape=(4, 5), global_offset=(2, 0)),
]


def key_of(group: int, bucket: int, state: str) -> str:
    dtypes = "dtype_(torch.bfloat16, torch.float32)"
    return f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0.{dtypes}.bucket_idx_{bucket}.{state}"


def write(path: Path, tensors: dict[str, Any], common: Any = None) -> None:
    """As Megatron-Core's `torch_dist`: a stock directory, its mark, and plain values as they were up to 0.17."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(tensors, checkpoint_id=path)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    if common is not None:
        torch.save(common, path / "common.pt")


def write_states(
    path: Path, optimizer: torch.optim.Optimizer, model: nn.Module, *, main: str, prefix: str = ""
) -> None:
    """The weights and states of torch's AdamW as Megatron-Core stores those of its own, with bf16 weights."""
    tensors: dict[str, Any] = {}
    for name, param in model.named_parameters():
        tensors[name] = param.detach().bfloat16()
        tensors[f"{prefix}optimizer.state.{main}.{name}"] = param.detach()
        for state in ("exp_avg", "exp_avg_sq"):
            tensors[f"{prefix}optimizer.state.{state}.{name}"] = optimizer.state[param][state]
    groups = [{"step": 2.0, "lr": 0.5}]
    of_optimizer = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}
    common = {"optimizer": {0: of_optimizer} if prefix else of_optimizer, "iteration": 2}
    write(path, tensors, common)


@pytest.mark.parametrize("form", ["theirs", "in a chain", "converted"])
def test_a_torch_optimizer_goes_on_from_their_states(tmp_path: Path, form: str) -> None:
    path = tmp_path / "theirs"
    model, optimizer = trained(2)
    prefix = "chained_0." if form == "in a chain" else ""
    write_states(path, optimizer, model, main="fp32_param" if prefix else "param", prefix=prefix)
    if form == "converted":
        path = tmp_path / "ours"
        megatron_to_checkpoint(tmp_path / "theirs", path)
    again, other = trained(0)
    again.load_state_dict(model.state_dict())
    report = load_optimizer(again, other, path)
    assert report.uninitialised == report.gone == ()
    assert {name for states in other.state.values() for name in states} == {"step", "exp_avg", "exp_avg_sq"}
    assert train(again, other, 2, 5) == train(model, optimizer, 2, 5)


def test_stacked_layers_are_refused_for_a_torch_optimizer(written: Path) -> None:
    layers = nn.Module()
    layers.decoder = nn.Module()
    layers.decoder.layers = nn.ModuleList([nn.Module()])
    layers.decoder.layers[0].mlp = nn.Module()
    layers.decoder.layers[0].mlp.linear_fc1 = nn.Linear(16, 64, bias=False)
    optimizer = torch.optim.AdamW(layers.parameters())
    with pytest.raises(CheckpointKeyError, match=r"layers\.0\.mlp\.linear_fc1\.weight stacked with those of other"):
        load_optimizer(layers, optimizer, written / "theirs")
    assert not optimizer.state


@pytest.fixture
def buckets(tmp_path: Path) -> dict[str, torch.Tensor]:
    keys = {key_of(group, bucket, state): bucket for group in (0, 1) for bucket in (0, 1) for state in STATES}
    generator = torch.Generator().manual_seed(0)
    found = {key: torch.randn((76, 10)[bucket], generator=generator) for key, bucket in keys.items()}
    write(tmp_path / "theirs", {**found, "extra/shard_0_1": "kept"})
    return found


def test_buckets_become_parameters_by_their_slots(tmp_path: Path, buckets: dict[str, torch.Tensor]) -> None:
    megatron_to_checkpoint(tmp_path / "theirs", tmp_path / "ours", slots=SLOTS, step=7)
    ours = whole_tensors(tmp_path / "ours")
    for state in STATES:
        name = f"optimizer.state.{'fp32_param' if state == 'param' else state}"
        first, second = (buckets[key_of(group, 0, state)] for group in (0, 1))
        halves = [flat[64:76].view(4, 3) for flat in (first, second)]
        assert torch.equal(ours[f"{name}.w"], torch.cat(halves, 1))
        assert torch.equal(ours[f"{name}.b"], first[:50])
        tops = [buckets[key_of(group, 1, state)].view(2, 5) for group in (0, 1)]
        assert torch.equal(ours[f"{name}.top"], torch.cat(tops))
    assert ours["optimizer.state.step.w"].item() == 7
    assert load({"x": ShardedObject("extra", None, (1,), (0,))}, tmp_path / "ours").state["x"] == "kept"
    assert {p.name for p in tmp_path.iterdir()} == {"theirs", "ours"}


def test_buckets_of_two_optimizers_in_a_chain_are_told_apart(tmp_path: Path) -> None:
    drawn_buckets = {
        f"chained_{number}.{key_of(0, 0, state)}": torch.randn(8 + number) for number in (0, 1) for state in STATES
    }
    write(tmp_path / "theirs", drawn_buckets, {"optimizer": {0: {"step": 5}, 1: {"step": 5}}})
    slots = [BucketSlot(name=f"w{n}", shape=(8 + n,), start=0, optimizer=n) for n in (0, 1)]
    megatron_to_checkpoint(tmp_path / "theirs", tmp_path / "ours", slots=slots)
    ours = whole_tensors(tmp_path / "ours")
    for number in (0, 1):
        for state in STATES:
            ours_key = f"optimizer.state.{'fp32_param' if state == 'param' else state}.w{number}"
            assert torch.equal(ours[ours_key], drawn_buckets[f"chained_{number}.{key_of(0, 0, state)}"])
        assert ours[f"optimizer.state.step.w{number}"].item() == 5


SCALE = {"scale": torch.tensor([512.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
OF_OPTIMIZER: dict[str, tuple[str, bool, dict[Any, Any]]] = {  # prefix, whether there are main weights, common state
    "fp32": ("", False, {"state": {"common_step": torch.tensor(4.0)}}),
    "fp16": ("", True, {"optimizer": {"param_groups": [{"step": 4}]}, "grad_scaler": SCALE}),
    "in a chain": ("chained_1.", True, {1: {"optimizer": {"state": {"common_step": 4}}, "grad_scaler": SCALE}}),
}


@pytest.mark.parametrize("form", OF_OPTIMIZER)
def test_steps_and_the_loss_scale_are_converted(tmp_path: Path, form: str) -> None:
    prefix, has_mains, of_optimizer = OF_OPTIMIZER[form]
    shapes = {"decoder.layers.mlp.fc1.weight": (3, 4), "layers.mlp.experts.fc1.weight": (3, 2, 4, 5), "head": (4,)}
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    for state in ("exp_avg", *(["fp32_param"] if has_mains else [])):
        tensors |= {f"{prefix}optimizer.state.{state}.{name}": torch.full(shape, 2.0) for name, shape in shapes.items()}
    write(tmp_path / "theirs", tensors, {"optimizer": of_optimizer})
    megatron_to_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    ours = whole_tensors(tmp_path / "ours")
    assert {key.removeprefix(prefix) for key in tensors} == {key for key in ours if ".step." not in key}
    steps = {name: ours[f"optimizer.state.step.{name}"] for name in shapes}
    assert {name: tuple(step.shape) for name, step in steps.items()} == dict(zip(shapes, [(3,), (3, 2), ()]))
    assert all((step == 4).all() for step in steps.values())
    scale = {} if form == "fp32" else {"grad_scaler": {"scale": 512.0, "growth_tracker": 3, "hysteresis_tracker": 2}}
    expected = {"version": 1, "groups": {"groups": [], "names": []}, **scale}  # as of an opt-stack optimizer
    assert read_common(read_index(tmp_path / "ours"))["optimizer"] == expected
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "x.pt"), "--to", "torch"]) == 2


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__0_0.distcp", "common.pt"])
def test_files_are_compared_with_integrity_json(tmp_path: Path, name: str) -> None:
    write(tmp_path, {"w": torch.randn(100)}, {"iteration": 3})
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    recorded = {"algorithm": "sha256", "files": hashes}
    (tmp_path / "integrity.json").write_text(json.dumps(recorded))
    assert verify_checkpoint(tmp_path) == []
    changed = bytearray((tmp_path / name).read_bytes())
    changed[-1] ^= 1  # no other check sees it
    (tmp_path / name).write_bytes(changed if name != ".metadata" else bytes([*changed[:-1], changed[-1] ^ 1, 0]))
    (finding,) = verify_checkpoint(tmp_path)
    assert (finding.file, "SHA-256" in finding.problem) == (name, True)
    (tmp_path / "integrity.json").write_text(json.dumps({**recorded, "algorithm": "md5"}))
    assert "'md5', which is not known; allowed: sha256" in verify_checkpoint(tmp_path)[0].problem
    (tmp_path / "integrity.json").write_text("[]")
    assert "integrity.json: is damaged" in str(verify_checkpoint(tmp_path)[0])


def moved(number: int, **changes: Any) -> list[BucketSlot]:
    fields = {name: getattr(SLOTS[number], name) for name in BucketSlot.__slots__}
    return [*SLOTS[:number], BucketSlot(**{**fields, **changes}), *SLOTS[number + 1 :]]


REFUSED = [
    (moved(2, bucket=5), r"b: no bucket has optimizer 0, group 0, buffer 0, bucket 5; there are optimizer 0, group 0,"),
    (moved(2, optimizer=1), r"b: no bucket has optimizer 1, group 0, buffer 0, bucket 0"),
    (moved(0, start=40), r"w: elements \[40, 52\) .* must begin less than .* after element 50"),
    (moved(0, start=72), r"w: elements \[72, 84\) .* end within its 76 elements"),
    (SLOTS[:2] + SLOTS[3:], r"w: elements \[64, 76\) .* must begin .* after element 0"),  # a gap that is not padding
    (SLOTS[:-1], r"elements \[0, 10\) of .*bucket_idx_1.* belong to no slot"),
    (moved(1, global_offset=(0, 0)), r"has other values in group 1 than in an earlier one"),  # a hole in a parameter
]


def test_slots_of_another_layout_and_remainders_are_refused(tmp_path: Path, buckets: Any) -> None:
    for slots, text in REFUSED:
        with pytest.raises(CheckpointingException, match=text):
            megatron_to_checkpoint(tmp_path / "theirs", tmp_path / "ours", slots=slots)
    write(tmp_path / "narrow", {key_of(0, 0, "param"): torch.zeros(10, dtype=torch.int16)})
    slots = [BucketSlot(name="w", shape=(10,), start=0)]
    with pytest.raises(CheckpointingException, match=r"param is stored as torch.int16: 16-bit remainders"):
        megatron_to_checkpoint(tmp_path / "narrow", tmp_path / "ours", slots=slots)
    assert {p.name for p in tmp_path.iterdir()} == {"theirs", "narrow"}


def test_the_command_line_converts_and_a_load_says_so(
    tmp_path: Path, buckets: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointKeyError, match=r"dp_reshardable, .* convert it first: optckpt convert"):
        load({"x": sharded_like("optimizer.state.exp_avg.w", torch.zeros(4, 6))}, tmp_path / "theirs")
    command = ["convert", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--from", "megatron"]
    assert main(command) == 2
    assert "Pass slots= (--slots FILE)" in capsys.readouterr().err
    rows = [{name: getattr(slot, name) for name in BucketSlot.__slots__} for slot in SLOTS]
    (tmp_path / "slots.json").write_text(json.dumps(rows))
    assert main([*command, "--slots", str(tmp_path / "slots.json"), "--step", "3"]) == 0
    assert "optimizer.state.step.top" in read_index(tmp_path / "ours").tensors
