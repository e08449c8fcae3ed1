"""The depth of parameters, by common names of layers and of the stages that hold them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from opt_config import ConfigError

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|resblocks|h)\.(?:encoder_layer_)?(\d+)\.")
# Stages of Swin, ConvNeXt and their kin. The `features` of torchvision alternate between layers and downsampling.
_STAGE = re.compile(
    r"(?:^|\.)(?:(?P<container>stages|features|downsample_layers)\.(\d+)\.|layers\.(\d+)\.(?=blocks\.|downsampl))"
)
_LAYER_OF_STAGE = re.compile(r"(?:(?:blocks?|layers?)\.)?(\d+)\.")
_LAYER_OF_FEATURES = re.compile(
    r"(\d+)\.(?:[^.]+\.|layer_scale$)"
)  # not of `features.0.0.weight`, the convolution of the stem
_OUTPUT = re.compile(r"(?:^|\.)(?:unembed\w*|embed_out)(?:\.|$)")
_INPUT = re.compile(
    r"embed|(?:^|\.)(?:wte|wpe|shared|stem|patch\w*|conv1|conv_proj|ln_pre|pre_layrnorm|\w+_token)(?:\.|$)"
)


class _Place(NamedTuple):
    """The place of a parameter in a model with stages."""

    tower: str  # the part of the name before the stages
    stage: int
    layer: int | None  # its number in the stage; None: it is in no layer, such as a downsampling
    is_before: bool = False  # whether it is certain that what is in no layer comes before those of its stage


def depths_by_name(names: Iterable[str]) -> dict[str, int | None]:
    """Return the depth of each parameter: 0 for embeddings, i + 1 for layer i, None after the layers.

    Layers are counted over all stages. A downsampling belongs to the layer after it; if the first stage has one, to the
    layer before it, since stages end with theirs.

    Raises:
        ConfigError: stages or layers are missing before others, as on later ranks of a pipeline.

    >>> depths_by_name(["embed.weight", "layers.11.mlp.weight", "head.weight"])
    {'embed.weight': 0, 'layers.11.mlp.weight': 12, 'head.weight': None}
    >>> depths_by_name(["stages.0.blocks.0.weight", "stages.1.downsample.weight", "stages.1.blocks.0.weight"])
    {'stages.0.blocks.0.weight': 1, 'stages.1.downsample.weight': 2, 'stages.1.blocks.0.weight': 2}
    """
    places = {name: _place(name) for name in names}
    by_tower: dict[str, list[_Place]] = defaultdict(list)
    for place in places.values():
        if place is not None:
            by_tower[place.tower].append(place)
    towers = {}
    for tower, of_tower in by_tower.items():
        if any(place.layer is not None for place in of_tower):
            towers[tower] = _Stages(tower, of_tower)
    depths: dict[str, int | None] = {}
    for name, place in places.items():
        if place is None or place.tower not in towers:
            depths[name] = _depth_without_stages(name)
        else:
            depths[name] = towers[place.tower].depth(place)
    return depths


def _depth_without_stages(name: str) -> int | None:
    layer = _LAYER.search(name)
    if layer:
        return int(layer[1]) + 1
    return 0 if _INPUT.search(name) and not _OUTPUT.search(name) else None


def _place(name: str) -> _Place | None:
    found = _STAGE.search(name)
    if found is None:
        return None
    container = found["container"]
    inner = name[found.end() :]
    stage = int(found[2] or found[3])
    if container == "downsample_layers":
        return _Place(name[: found.start()], stage, None, is_before=True)
    pattern = _LAYER_OF_FEATURES if container == "features" else _LAYER_OF_STAGE
    layer = pattern.match(inner)
    return _Place(name[: found.start()], stage, None if layer is None else int(layer[1]))


class _Stages:
    """The stages of one tower."""

    def __init__(self, tower: str, places: Sequence[_Place]) -> None:
        """Raise ConfigError if a stage or a layer is missing before others."""
        layers: dict[int, set[int]] = defaultdict(set)
        for place in places:
            layers[place.stage] |= set() if place.layer is None else {place.layer}
        numbers = sorted(layers)
        self._sizes = [len(layers[stage]) for stage in numbers]
        in_no_layer = [p for p in places if p.stage == 0 and p.layer is None and not p.is_before]
        self._ends_with_other = bool(in_no_layer and layers[0])
        missing = sorted(set(range(numbers[-1])) - {*numbers})
        if missing:
            self._refuse(tower, f"stage {missing[0]}")
        for stage in numbers:
            missing = sorted(set(range(max(layers[stage], default=0))) - layers[stage])
            if missing:
                self._refuse(tower, f"layer {missing[0]} of stage {stage}")

    def _refuse(self, tower: str, missing: str) -> NoReturn:
        of_tower = f" of {tower!r}" if tower else ""
        raise ConfigError(
            f"get_layer_decay_overrides: {missing}{of_tower} is not in the model chunks, so that the layers before the "
            "others cannot be counted; pass depth_of=, which maps the name of a parameter to its depth"
        )

    def depth(self, place: _Place) -> int | None:
        """Return the depth of a parameter in a stage; None after the last layer."""
        before = sum(self._sizes[: place.stage])
        if place.layer is not None:
            return before + place.layer + 1
        if self._ends_with_other and not place.is_before:
            return before + self._sizes[place.stage]
        if before == sum(self._sizes):
            return None
        return before + 1 if before else 0
