"""`ReadOnlyView`: a view of a `QuantizedTensor`, which can be read like any tensor but not written."""

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from opt_kernels.quantized.recipes import QuantizationError

aten: Any = torch.ops.aten  # type: ignore[attr-defined, unused-ignore]

_UNDECLARED_VIEWS = {aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes}


class ReadOnlyView(Tensor):
    """A view of an fp8 parameter: a copy of its dequantised values, so that writing it would not change the parameter.

    Operations that write it raise QuantizationError, and its views are read-only, too. Results of other operations are
    ordinary tensors. Code that writes through a raw pointer (`data_ptr`, `untyped_storage`) is not noticed.
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
        if any(getattr(kind, "has_codes", False) for kind in types):
            return NotImplemented  # the fp8 tensor among the arguments computes it
        kwargs = kwargs or {}
        refuse_writes(func, args, kwargs)
        plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
        return read_only(func, func(*plain_args, **plain_kwargs))

    @property
    def data(self) -> "ReadOnlyView":
        """The same memory, apart from autograd."""
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
        """Raises QuantizationError: other processes could write it."""
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
    for number, declared in enumerate(func._schema.arguments):
        if declared.alias_info is not None and declared.alias_info.is_write:
            yield args[number] if number < len(args) else kwargs.get(declared.name)


def _plain(x: Any) -> Any:
    return x.plain if isinstance(x, ReadOnlyView) else x


def _refuse(what: str) -> NoReturn:
    raise QuantizationError(
        f"{what} would write a view of an fp8 parameter, which is a copy of its values, and the parameter would not "
        "change; assign elements of the parameter itself (param[index] = values), or write all of it "
        "(param.copy_(values))"
    )
