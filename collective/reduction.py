"""Reduction operations and dtype rules, and how a tensor becomes memory that the engine can use.

The rules: sixteen-bit floats are folded in float32 and cast back once, at the end; a mean divides
before that cast; NaN propagates through min and max; bool stays bool (sum is *or*, product is
*and*); integers keep their type and have no mean; strided tensors go through a contiguous copy,
their neighbours untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from numbers import Real
from typing import Any

import numpy as np
import torch

from collective.device_copies import host_room, to_device, to_host
from collective.errors import Refused

#: bytes up to which a contribution is kept until all ranks take part; copying so many costs little
KEPT = 64 << 10

Array = np.ndarray[Any, np.dtype[Any]]
Fold = Callable[[Array, Array, Array], object]


class ReduceOp(StrEnum):
    """How the values of the ranks are combined."""

    SUM = "sum"
    MEAN = "mean"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    @classmethod
    def of(cls, value: ReduceOp | str) -> ReduceOp:
        """The operation of that name; `avg` and `prod` are accepted as torch's spellings."""
        try:
            return cls({"avg": "mean", "prod": "product"}.get(str(value), value))
        except ValueError:
            names = ", ".join(op.value for op in cls)
            raise Refused(f"unknown reduction {value!r}; there are {names}") from None


def _minimum(a: Array, b: Array, out: Array) -> object:
    return np.minimum(a, b, out=out)  # its third positional argument is deprecated


def _maximum(a: Array, b: Array, out: Array) -> object:
    return np.maximum(a, b, out=out)


# Ranks may fold the same two values with their places changed, and must get the same bits.  Of 0
# and -0, and of two NaNs, numpy takes the one that stands first or second; its product of complex
# numbers is rounded after one of two products and not after the other.


def _float_minimum(a: Array, b: Array, out: Array) -> object:
    bits = f"u{a.itemsize}"
    turned = np.minimum(b, a).view(bits)
    here = np.minimum(a, b, out=out).view(bits)
    return np.maximum(here, turned, out=here)  # the sign is the highest bit: -0


def _float_maximum(a: Array, b: Array, out: Array) -> object:
    bits = f"u{a.itemsize}"
    turned = np.maximum(b, a).view(bits)
    here = np.maximum(a, b, out=out).view(bits)
    return np.minimum(here, turned, out=here)


def _complex_product(a: Array, b: Array, out: Array) -> object:
    real = a.real * b.real - a.imag * b.imag
    out.imag = a.real * b.imag + a.imag * b.real
    out.real = real
    return out


_FOLDS: dict[ReduceOp, Fold] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: _minimum,
    ReduceOp.MAX: _maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
_BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
_WIDENED = (torch.float16, torch.bfloat16)
_INTEGERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
_FLOATS = (torch.float32, torch.float64, *_WIDENED)
_COMPLEX = (torch.complex64, torch.complex128)
#: what is folded otherwise in some dtypes
_OTHER_FOLDS: dict[torch.dtype, dict[ReduceOp, Fold]] = {
    torch.bool: {ReduceOp.SUM: _maximum, ReduceOp.PRODUCT: _minimum},
    **{kind: {ReduceOp.MIN: _float_minimum, ReduceOp.MAX: _float_maximum} for kind in _FLOATS},
    **{kind: {ReduceOp.PRODUCT: _complex_product} for kind in _COMPLEX},
}


def check_reduction(op: ReduceOp, dtype: torch.dtype, prescale: float | None = None) -> None:
    """Refuse combinations that have no right answer.

    Raises:
        Refused: the mean of integers or bools, bit operations on floats, the order of complex
            numbers, a dtype without arithmetic here, a factor that is no finite number, or any
            factor for integers or bools.
    """
    name = str(dtype).removeprefix("torch.")
    if prescale is not None:
        if not _is_finite(prescale):
            raise Refused(f"prescale must be a finite number, not {prescale!r}")
        if not (dtype.is_floating_point or dtype.is_complex):
            raise Refused(
                f"prescale={prescale!r} would not leave {name} a {name}: "
                "convert to a float dtype first"
            )
    if dtype in _FLOATS:
        if op in _BITS:
            raise Refused(f"{op.value} is defined for integers and bool, not for {name}")
    elif dtype in _INTEGERS or dtype is torch.bool:
        if op is ReduceOp.MEAN:
            raise Refused(
                f"the mean of {name} is not an integer: reduce with sum and divide, "
                "or convert to a float dtype first"
            )
    elif dtype in _COMPLEX:
        if op not in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT):
            raise Refused(f"{op.value} is not defined for {name}: complex numbers have no order")
    else:
        wide = "complex64" if dtype.is_complex else "float32"
        raise Refused(f"there is no reduction for {name}; convert to {wide} first")


def _is_finite(factor: object) -> bool:
    try:
        return not isinstance(factor, bool) and isinstance(factor, Real) and math.isfinite(factor)
    except OverflowError:  # a whole number or a fraction beyond all floats
        return False


def fold_of(op: ReduceOp, dtype: torch.dtype) -> Fold:
    """The function `f(a, b, out)` that folds one array into another: `out` may be `a`.

    It gives the same bits for `f(b, a, out)`, but for which bits of a NaN are set where both are
    NaN in a sum or product.
    """
    return _OTHER_FOLDS.get(dtype, {}).get(op) or _FOLDS[op]


def check_tensor(tensor: torch.Tensor, role: str, *, written: bool) -> None:
    """Refuse tensors that have no memory of their own to read or write.

    Raises:
        Refused: not a dense tensor, on a device without data, or (where it is written) one whose
            elements share memory, such as an expanded tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise Refused(f"{role} must be a torch.Tensor, not {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise Refused(f"{role} is {tensor.layout}; make it dense with .to_dense() first")
    if tensor.is_quantized:
        raise Refused(f"{role} is quantized; send .dequantize(), or its .int_repr()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise Refused(
            f"{role} is on {tensor.device}; only dense cpu and cuda tensors are supported"
        )
    if written and not tensor.is_contiguous() and _overlaps(tensor):
        raise Refused(
            f"{role} of shape {list(tensor.shape)} and strides {list(tensor.stride())} has "
            "elements that share memory, so it cannot hold a result; use .contiguous() or .clone()"
        )


def _overlaps(tensor: torch.Tensor) -> bool:
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return False
        if size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as one dimension that shares its memory."""
    flat = tensor.detach().reshape(-1)
    # one element counts as contiguous whatever its stride, but cannot be viewed as bytes then
    return flat.as_strided((1,), (1,)) if flat.numel() == 1 else flat


def host_array(tensor: torch.Tensor) -> Array:
    """The elements of a contiguous cpu tensor as a flat array that shares its memory.

    Sixteen-bit bfloat and other types without a numpy counterpart come as unsigned integers.
    """
    flat = flattened(tensor)
    if flat.is_conj():
        flat = flat.resolve_conj()
    if flat.is_neg():
        flat = flat.resolve_neg()
    if flat.dtype is torch.bool:
        return flat.view(torch.uint8).numpy()
    try:
        return flat.numpy()
    except TypeError:
        unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
        return flat.view(unsigned[flat.element_size()]).numpy()


def room_for(count: int, dtype: torch.dtype, *, widen: bool = False) -> Array:
    """Host memory for so many elements; float32 for sixteen-bit floats that are to be combined."""
    return np.empty(count, _host_type(torch.float32 if widen and dtype in _WIDENED else dtype))


@lru_cache(maxsize=64)
def _host_type(dtype: torch.dtype) -> np.dtype[Any]:
    return host_array(torch.empty(0, dtype=dtype)).dtype


def fill(array: Array, tensor: torch.Tensor) -> None:
    """Put the elements of `tensor` into memory that `room_for` made for them."""
    source = tensor.detach() if tensor.device.type == "cpu" else to_host(tensor)
    _tensor_on(array, tensor).copy_(source)


def pour(array: Array, tensor: torch.Tensor) -> None:
    """Put what lies in memory that `room_for` made into `tensor`."""
    values = _tensor_on(array, tensor)
    if tensor.device.type == "cpu":
        tensor.detach().copy_(values)
    else:
        to_device(values, tensor.detach())


def _tensor_on(array: Array, tensor: torch.Tensor) -> torch.Tensor:
    """The memory as a tensor of the type and shape of `tensor`; float32 stays what it is."""
    flat = torch.from_numpy(array)
    if flat.dtype != tensor.dtype and flat.dtype is not torch.float32:
        flat = flat.view(tensor.dtype)
    return flat.view(tensor.shape)


class Buffer:
    """A tensor as flat host memory for one operation, and the way back.

    Attributes:
        array: one dimension, the working dtype (float32 for sixteen-bit floats that are reduced).
    """

    __slots__ = ("_room", "_shared", "array", "tensor")

    def __init__(
        self,
        tensor: torch.Tensor,
        *,
        widen: bool = False,
        private: bool = False,
        blank: bool = False,
    ) -> None:
        """Make `tensor` available: its own memory where that will do, else a copy.

        Args:
            tensor: what is sent or received.
            blank: its values are not needed, only replaced.
            widen: fold sixteen-bit floats in float32.
            private: never work in the tensor's own memory.
        """
        self.tensor = tensor
        if tensor.device.type == "cpu":
            source = tensor.detach()
        else:
            source = host_room(tensor) if blank else to_host(tensor)
        self._room = source  # which counts as pinned memory for as long as somebody has it
        if widen and source.dtype in _WIDENED:
            source = source.to(torch.float32)
        self._shared = False
        if not source.is_contiguous():
            source = source.contiguous()
        elif source.data_ptr() == tensor.data_ptr():
            if private:
                source = source.clone()
            else:
                self._shared = not (source.is_conj() or source.is_neg())
        self.array = host_array(source)

    def undo(self) -> Callable[[], None] | None:
        """What makes a tensor of up to `KEPT` bytes what it is now; None where nothing need be."""
        if not self._shared or self.array.nbytes > KEPT:
            return None
        kept = self.array.copy()
        return lambda: np.copyto(self.array, kept)

    def commit(self) -> None:
        """Write the array back into the tensor, cast once, unless it is the tensor's own memory."""
        if self._shared:
            return
        target = self.tensor.detach()
        result = torch.from_numpy(self.array).reshape(target.shape)
        if result.dtype != target.dtype and target.dtype not in _WIDENED:
            result = result.view(target.dtype)  # bool and types without a numpy counterpart
        elif target.dtype is torch.bfloat16 and result.dtype is torch.uint16:
            result = result.view(torch.bfloat16)
        if target.device.type == "cpu":
            target.copy_(result)
        else:
            to_device(result, target)


def scale(array: Array, factor: float | None) -> None:
    """Multiply a contribution by its factor, if there is one, in place and in the array's dtype."""
    if factor is not None:
        with np.errstate(all="ignore"):  # inf and NaN are results, not warnings
            np.multiply(array, array.dtype.type(factor), out=array)


def divide(array: Array, count: int) -> None:
    """Turn a sum into the mean of `count` contributions, in place."""
    np.divide(array, count, out=array)


class Narrow:
    """Sixteen-bit floats where they lie, and in float32 what this rank sums of them.

    For schedules in which no partial sum travels (`collective.strategies.ORIGINALS`): what is sent
    is either a rank's original or a final result, which its owner divides and casts once.  So
    half the bytes travel, only sums are widened, and every rank gets the same bytes.
    """

    def __init__(self, values: Array, dtype: torch.dtype, run: tuple[int, int], divisor: int):
        """Sum the elements [start, stop) of `values`.

        Args:
            values: of all ranks' parts, as `host_array` gives them.
            dtype: of the values.
            run: what this rank sums.
            divisor: of the results.
        """
        self._dtype = dtype
        self._divisor = divisor
        self._start = run[0]
        self._values = torch.from_numpy(values).view(dtype)
        #: the sums of the run
        self.wide: Array = self._values[run[0] : run[1]].to(torch.float32).numpy()
        self._finished: set[tuple[int, int]] = set()

    def sums(self, start: int, stop: int) -> Array:
        """Where the elements [start, stop) are summed."""
        return self.wide[start - self._start : stop - self._start]

    def finish(self, start: int, stop: int) -> None:
        """Put results, whose sums are complete, in the place of this rank's originals."""
        if (start, stop) not in self._finished:
            self._finished.add((start, stop))
            self._write(start, stop)

    def finish_all(self) -> None:
        """Put all results in place that `finish` has not."""
        if sum(stop - start for start, stop in self._finished) < self.wide.size:
            self._write(self._start, self._start + self.wide.size)

    def _write(self, start: int, stop: int) -> None:
        values = self.sums(start, stop)
        if self._divisor != 1:
            values = values / np.float32(self._divisor)
        self._values[start:stop] = torch.from_numpy(values)

    def unpack(self, data: Array) -> Array:
        """The float32 values of received bytes."""
        if not data.flags.writeable:
            data = data.copy()  # torch takes no memory that it could not write, such as a peer's
        return torch.from_numpy(data).view(self._dtype).to(torch.float32).numpy()


def is_widened(dtype: torch.dtype) -> bool:
    """Whether tensors of `dtype` are folded in float32."""
    return dtype in _WIDENED
