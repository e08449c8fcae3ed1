"""`QuantizedTensor`: an fp8 parameter for plain torch on any device. Operations use its dequantised values.

Its views are `ReadOnlyView`, which can be read like any tensor but not written.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from opt_kernels.quantized.scaled import RECIPES, QuantizationError, QuantizedParam

aten: Any = torch.ops.aten  # type: ignore[attr-defined, unused-ignore]

_UNDECLARED_VIEWS = {aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes}


class ReadOnlyView(Tensor):
    """A view of an fp8 parameter: a copy of its dequantised values. A write to it would not change the parameter.

    Operations that write to it raise QuantizationError, and its views are read-only, too. Results of other operations
    are ordinary tensors. Code that writes through a raw pointer (`data_ptr`, `untyped_storage`) is not noticed.
    """

    plain: Tensor  # the same memory

    @staticmethod
    def of(values: Tensor) -> "ReadOnlyView":
        """A read-only tensor in the memory of `values`."""
        if type(values) is Tensor:
            made = Tensor._make_subclass(ReadOnlyView, values)
        else:  # torch.compile traces with tensors that have no memory
            made = Tensor._make_wrapper_subclass(
                ReadOnlyView,
                values.shape,
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                device=values.device,
            )
        made.plain = values
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, QuantizedTensor) for kind in types):
            return NotImplemented  # the dispatch of the fp8 tensor among the arguments handles it
        kwargs = kwargs or {}
        refuse_writes(func, args, kwargs)
        plain_args, plain_kwargs = tree_map(_dequantized, (args, kwargs))
        return read_only(func, func(*plain_args, **plain_kwargs))

    @property
    def data(self) -> "ReadOnlyView":
        """The same memory, detached from autograd."""
        return ReadOnlyView.of(self.plain)

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse("an assignment to `data`")

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only array in this memory. Raises RuntimeError as for other tensors that require gradients."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on a tensor that requires grad; use tensor.detach().numpy()")
        array = self.plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """The elements as nested lists."""
        return self.plain.tolist()

    def share_memory_(self) -> NoReturn:
        """Raises QuantizationError: other processes could write to it."""
        _refuse("share_memory_()")

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        """Raises QuantizationError: DLPack consumers could write to it."""
        _refuse("__dlpack__()")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy: Tensor = memo.setdefault(id(self), self.plain.clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReadOnlyView({self.plain!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def read_only(func: Any, result: Any) -> Any:
    """The result of `func` on dequantised arguments; read-only if it is a view of one of them."""
    if not func.is_view and func.overloadpacket not in _UNDECLARED_VIEWS:
        return result
    return tree_map(lambda x: ReadOnlyView.of(x) if isinstance(x, Tensor) else x, result)


def refuse_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise QuantizationError if `func` writes a view, or is a collective, which does not declare what it writes."""
    if func.namespace == "c10d":
        raise QuantizationError(
            f"{func} of an fp8 tensor would work on a dequantised copy; pass the tensor's codes and scales, or its "
            "dequantize()"
        )
    for written in written_arguments(func, args, kwargs):
        if any(isinstance(leaf, ReadOnlyView) for leaf in tree_leaves(written)):
            _refuse(str(func))


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation declares to write: tensors, lists of them, or None."""
    for position, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield args[position] if position < len(args) else kwargs.get(declared.name)


def _refuse(what: str) -> NoReturn:
    raise QuantizationError(
        f"{what} would write a view of an fp8 parameter, which is a copy of its values, and the parameter would not "
        "change; assign elements of the parameter itself (param[index] = values), or write all of it "
        "(param.copy_(values))"
    )


class QuantizedTensor(Tensor):
    """A tensor of fp8 codes and scales that behaves as a dense one of `dtype`: `nn.Parameter(QuantizedTensor.of(w))`.

    Operations and conversions to another dtype dequantise it first. An operation that writes to it (`copy_`, `mul_`,
    `torch._foreach_add_`, `out=`, an assignment to elements) quantises the whole tensor again. A view (`t`, `view`,
    indexing) is a `ReadOnlyView`: an operation that writes to a view raises QuantizationError. Write
    `param[0] = param[0] + 1` instead of `param[0] += 1`; `nn.init.orthogonal_` does not work. The gradient is an
    ordinary tensor. Copies are quantised, too. Pickling, as in `torch.save`, stores the dequantised values.

    `scaled` is the `QuantizedParam`, shared with detached aliases; its attributes are also those of the tensor.
    """

    scaled: QuantizedParam

    @staticmethod
    def __new__(cls, scaled: QuantizedParam, *, dtype: torch.dtype) -> "QuantizedTensor":
        made: QuantizedTensor = Tensor._make_wrapper_subclass(
            cls, scaled.shape, dtype=dtype, device=scaled.codes.device
        )
        made.scaled = scaled
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "scaled" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scaled, name)

    @classmethod
    def of(
        cls, values: Tensor, recipe: str = "tensorwise", *, dtype: torch.dtype | None = None, keep_initial: bool = True
    ) -> "QuantizedTensor":
        """Quantise `values`.

        Args:
            values: of any float dtype; not modified.
            recipe: "delayed", "tensorwise", "blockwise" or "mxfp8", see `opt_kernels.quantized.scaled`.
            dtype: the dtype that the tensor appears to have. None: that of `values`.
            keep_initial: keep a copy of `values` until an optimizer has initialised its main values from it.

        Raises:
            QuantizationError: an unknown recipe, or one that cannot scale this shape.
        """
        if recipe not in RECIPES:
            raise QuantizationError(f"recipe={recipe!r}: {', '.join(RECIPES)} are allowed")
        problem = RECIPES[recipe].problem(tuple(values.shape))
        if problem or not values.is_floating_point():
            raise QuantizationError(
                f"a tensor of {values.dtype} and shape {tuple(values.shape)} cannot be quantised: "
                f"{problem or 'only floating-point tensors can'}"
            )
        scaled = QuantizedParam.empty(RECIPES[recipe], values.shape, values.device)
        scaled.quantize_(values)
        scaled.source = values.detach().clone() if keep_initial else None
        return cls(scaled, dtype=dtype or values.dtype)

    def values(self) -> Tensor:
        """The values, fp32."""
        return self.scaled.values()

    def dequantize(self) -> Tensor:
        """The values in the dtype that the tensor appears to have."""
        return self.scaled.values().to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = _OPERATIONS.get(func)
        if operation is not None and isinstance(args[0], QuantizedTensor):
            return operation(*args, **kwargs)
        refuse_writes(func, args, kwargs)
        plain_args, plain_kwargs = tree_map(_dequantized, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        for given, plain in _written(func, (args, kwargs), (plain_args, plain_kwargs)):
            if plain.shape != given.shape:
                raise QuantizationError(
                    f"{func} would change the shape of an fp8 tensor from {tuple(given.shape)} to "
                    f"{tuple(plain.shape)}; make a new one by QuantizedTensor.of"
                )
            _copy(given, plain)
            result = given if result is plain else result
        return read_only(func, result)

    @property
    def data(self) -> "QuantizedTensor":
        """An alias of this tensor without autograd. Assigning to it quantises the values into the same memory."""
        return _detach(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.dtype != self.dtype or value.shape != self.shape:
            raise QuantizationError(
                f"an fp8 tensor that appears as {self.dtype} of shape {tuple(self.shape)} cannot become {value.dtype} "
                f"of shape {tuple(value.shape)}; convert the model first, then quantise it"
            )
        _copy(self, value)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = ["codes", "scales"]
        if self.scaled.history is not None:
            names.append("history")
        return names, (self.scaled.recipe, self.shape, self.dtype, self.scaled.source)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], context: Any, size: Any, stride: Any) -> "QuantizedTensor":
        recipe, shape, dtype, source = context
        # `inner` has the codes, scales and history under the names of the fields.
        scaled = QuantizedParam(recipe=recipe, shape=shape, source=source, **inner)
        return QuantizedTensor(scaled, dtype=dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        recipe = self.scaled.recipe.name
        return f"QuantizedTensor(shape={shape}, dtype={self.dtype}, recipe={recipe!r}, device={self.device})"

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write to the dequantised values and quantise all of them again."""
        values = self.dequantize()
        values[index] = value
        self.copy_(values)

    def share_memory_(self) -> "QuantizedTensor":
        """Raises QuantizationError: another process would receive dequantised copies."""
        raise QuantizationError(
            "share_memory_() of an fp8 tensor: its codes and scales cannot be shared between processes; quantise in "
            "each process"
        )

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        """Raises QuantizationError: the dequantised values are not stored."""
        raise QuantizationError("__dlpack__() of an fp8 tensor, which keeps no values; export its dequantize()")

    def __deepcopy__(self, memo: dict[int, Any]) -> "QuantizedTensor":
        if id(self) not in memo:
            clone = _clone(self)
            clone.requires_grad_(self.requires_grad)
            clone.__dict__.update({k: v for k, v in self.__dict__.items() if k != "scaled"})
            clone.scaled.source = self.scaled.source
            memo[id(self)] = clone
        copy: QuantizedTensor = memo[id(self)]
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        values: Tensor = self.dequantize()
        if isinstance(self, nn.Parameter):
            values = nn.Parameter(values, requires_grad=self.requires_grad)
            # torch marks parameters of tensor subclasses by `_is_param`; a plain parameter has no such mark.
            vars(values).update({k: v for k, v in vars(self).items() if k not in ("scaled", "_is_param")})
        return values.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _written(func: Any, given: Any, plain: Any) -> Iterator[tuple[QuantizedTensor, Tensor]]:
    """The fp8 tensors to which an operation writes, also those in lists and in `out`, each with its new values."""
    for before, after in zip(written_arguments(func, *given), written_arguments(func, *plain), strict=True):
        for tensor, written in zip(tree_leaves(before), tree_leaves(after), strict=True):
            if isinstance(tensor, QuantizedTensor):
                yield tensor, written


def _dequantized(x: Any) -> Any:
    if isinstance(x, ReadOnlyView):
        return x.plain
    return x.dequantize() if isinstance(x, QuantizedTensor) else x


def _detach(x: QuantizedTensor) -> QuantizedTensor:
    """An alias without autograd."""
    return QuantizedTensor(x.scaled, dtype=x.dtype)


def _clone(x: QuantizedTensor, **kwargs: Any) -> QuantizedTensor:
    return QuantizedTensor(x.scaled.cloned(x.device), dtype=x.dtype)


def _to_copy(x: QuantizedTensor, **kwargs: Any) -> Tensor:
    """Copy: still quantised on another device, dequantised in another dtype."""
    device = kwargs.get("device") or x.device
    dtype = kwargs.get("dtype") or x.dtype
    if dtype != x.dtype:
        converted: Tensor = aten._to_copy.default(x.dequantize(), **kwargs)
        return converted
    scaled = x.scaled.cloned(torch.device(device))
    scaled.source = None if x.scaled.source is None else x.scaled.source.to(device)
    return QuantizedTensor(scaled, dtype=dtype)


def _copy(x: QuantizedTensor, source: Tensor, non_blocking: bool = False) -> QuantizedTensor:
    x.scaled.quantize_(_dequantized(source).expand(x.shape))
    x.scaled.forget_initial()
    return x


_OPERATIONS: Mapping[Any, Callable[..., Tensor]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy,
}


def quantize_linears_(
    module: nn.Module,
    recipe: str = "tensorwise",
    *,
    keep_initial: bool = True,
    only: Callable[[str, nn.Linear], bool] = lambda name, linear: True,
) -> list[str]:
    """Replace the weights of the linear layers of `module` by fp8 parameters. Returns the names of the weights.

    Attributes of the parameters are kept.

    Args:
        module: its parameters are replaced, so call this before wrapping it and before building the optimizer.
        recipe: see `QuantizedTensor.of`.
        keep_initial: see `QuantizedTensor.of`; keeps a copy of the weights until the optimizer is built.
        only: returns whether to quantise a layer, from its name and the layer.

    Raises:
        QuantizationError: see `QuantizedTensor.of`. The message names the layer, and no parameter is replaced.
    """
    linears = [(name, m) for name, m in module.named_modules() if isinstance(m, nn.Linear)]
    chosen = {name: linear for name, linear in linears if only(name, linear)}
    quantized: dict[nn.Parameter, nn.Parameter] = {}  # by weight, so that tied weights stay tied
    for name, linear in chosen.items():
        weight: nn.Parameter = linear.weight  # type: ignore[assignment]
        if weight not in quantized and not isinstance(weight, QuantizedTensor):
            try:
                values = QuantizedTensor.of(weight.detach(), recipe, keep_initial=keep_initial)
            except QuantizationError as error:
                raise QuantizationError(f"{name}.weight: {error}") from None
            replacement = nn.Parameter(values, requires_grad=weight.requires_grad)
            vars(replacement).update({key: value for key, value in vars(weight).items() if key != "_is_param"})
            quantized[weight] = replacement
    for holder in module.modules():
        for key, param in holder._parameters.items():
            if param is not None and param in quantized:
                holder._parameters[key] = quantized[param]
    return [f"{name}.weight" for name in chosen]
