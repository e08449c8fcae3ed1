"""The depth of parameters, by common names of layers and of the stages that hold them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opt_config import ConfigError

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|resblocks|h)\.(?:encoder_layer_)?(\d+)\.")
_AFTER_LAYERS = re.compile(r"(?:^|\.)mtp\.")  # Megatron-Core's multi-token prediction
# Stages of Swin, ConvNeXt and their kin. The `features` of torchvision alternate between layers and downsampling.
_STAGE = re.compile(
    r"(?:^|\.)(?:(?P<container>stages|features|downsample_layers)\.(\d+)\.|layers\.(\d+)\.(?=blocks\.|downsampl))"
)
_LAYER_OF_STAGE = re.compile(r"(?:(?:blocks?|layers?)\.)?(\d+)\.")
# Does not match `features.0.0.weight`, the convolution of the stem.
_LAYER_OF_FEATURES = re.compile(r"(\d+)\.(?:[^.]+\.|layer_scale$)")
_OUTPUT = re.compile(r"(?:^|\.)(?:unembed\w*|embed_out)(?:\.|$)")
_INPUT = re.compile(
    r"embed|(?:^|\.)(?:wte|wpe|shared|stem|patch\w*|conv1|conv_proj|ln_pre|pre_layrnorm|\w+_token)(?:\.|$)"
)


class _Place(NamedTuple):
    """The place of a parameter in a model with stages."""

    tower: str  # the part of the name before the stages
    stage: int
    layer: int | None  # its number in the stage; None: it is in no layer, such as a downsampling
    is_before: bool  # it is in no layer, and certainly comes before the layers of its stage


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
    in_stages: dict[_Place, int | None] = {}
    for tower, tower_places in by_tower.items():
        if any(place.layer is not None for place in tower_places):
            in_stages |= _depths_in_stages(tower, tower_places)
    depths = {}
    for name, place in places.items():
        depths[name] = in_stages[place] if place in in_stages else _depth_without_stages(name)
    return depths


def _place(name: str) -> _Place | None:
    found = _STAGE.search(name)
    if found is None:
        return None
    container = found["container"]
    is_before = container == "downsample_layers"
    pattern = _LAYER_OF_FEATURES if container == "features" else _LAYER_OF_STAGE
    layer = None if is_before else pattern.match(name, found.end())
    number = None if layer is None else int(layer[1])
    return _Place(name[: found.start()], int(found[2] or found[3]), number, is_before)


def _depths_in_stages(tower: str, places: Sequence[_Place]) -> dict[_Place, int | None]:
    """The depths of the places of one tower; None after the last layer.

    Raises ConfigError if a stage or a layer is missing before others.
    """
    layers: dict[int, set[int]] = defaultdict(set)
    for place in places:
        stage_layers = layers[place.stage]  # so that a stage without layers has an entry, too
        if place.layer is not None:
            stage_layers.add(place.layer)
    numbers = sorted(layers)
    missing = [f"stage {stage}" for stage in range(numbers[-1]) if stage not in layers]
    for stage in numbers:
        before = range(max(layers[stage], default=0))
        missing += [f"layer {layer} of stage {stage}" for layer in before if layer not in layers[stage]]
    if missing:
        suffix = f" of {tower!r}" if tower else ""
        raise ConfigError(
            f"get_layer_decay_overrides: {missing[0]}{suffix} is not in the model chunks, so that the layers before "
            "the others cannot be counted; pass depth_of=, which maps the name of a parameter to its depth"
        )
    sizes = [len(layers[stage]) for stage in numbers]
    in_no_layer = [place for place in places if place.stage == 0 and place.layer is None and not place.is_before]
    ends_with_other = bool(in_no_layer and layers[0])
    depths: dict[_Place, int | None] = {}
    for place in places:
        num_before = sum(sizes[: place.stage])
        if place.layer is not None:
            depths[place] = num_before + place.layer + 1
        elif ends_with_other and not place.is_before:
            depths[place] = num_before + sizes[place.stage]
        elif num_before == sum(sizes):
            depths[place] = None
        else:
            depths[place] = num_before + 1 if num_before else 0
    return depths


def _depth_without_stages(name: str) -> int | None:
    layer = None if _AFTER_LAYERS.search(name) else _LAYER.search(name)
    if layer:
        return int(layer[1]) + 1
    return 0 if _INPUT.search(name) and not _OUTPUT.search(name) else None
