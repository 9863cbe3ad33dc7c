"""The kernel that folds one run of elements of all ranks at once: CUDA source, run by CuPy.

The sum is taken in the order of the ranks, sixteen-bit floats in float32 and cast once, and
products are not fused into sums: so the bits are those of the CPU's fold in that order, but for
which zero is the minimum or maximum of 0 and -0, and for those of a NaN.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from collective.reduction import ReduceOp

_THREADS = 256
_BLOCKS = 1024

#: what is stored, and what is computed with; unsigned where wrapping must not be undefined
_FLOATS = {
    torch.float64: ("double", "double"),
    torch.float32: ("float", "float"),
    torch.float16: ("unsigned short", "float"),
    torch.bfloat16: ("unsigned short", "float"),
}
_COMPLEX = {torch.complex64: "float", torch.complex128: "double"}
_INTEGERS = {
    torch.int8: "char", torch.int16: "short", torch.int32: "int", torch.int64: "long long",
}  # fmt: skip
_BYTES = (torch.uint8, torch.bool)

_LOAD = {
    # no header for sixteen-bit floats: NVRTC has none of its own
    torch.float16: 'float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(s)); return f;',
    torch.bfloat16: "return __uint_as_float((unsigned int)s << 16);",
}
_STORE = {
    torch.float16: 'S s; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(s) : "f"(c)); return s;',
    torch.bfloat16: (
        "if (c != c) return 0x7fc0; unsigned int u = __float_as_uint(c);"
        " return (S)((u + 0x7fff + ((u >> 16) & 1)) >> 16);"
    ),
}
_COMBINE = {
    ReduceOp.SUM: "a + b",
    ReduceOp.MEAN: "a + b",
    ReduceOp.PRODUCT: "a * b",
    # a NaN on either side stays
    ReduceOp.MIN: "(a != a || a <= b) ? a : b",
    ReduceOp.MAX: "(a != a || a >= b) ? a : b",
    ReduceOp.BAND: "a & b",
    ReduceOp.BOR: "a | b",
    ReduceOp.BXOR: "a ^ b",
}
_BOOL = {ReduceOp.SUM: "a | b", ReduceOp.PRODUCT: "a & b"}

#: complex numbers as pairs; division by a real number as numpy does it, by its inverse
_PAIR = """
struct S {{ {real} re, im; }};
typedef S C;
__device__ C operator+(C a, C b) {{ return {{a.re + b.re, a.im + b.im}}; }}
__device__ C operator*(C a, C b) {{
    return {{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}};
}}
__device__ C times(C a, double f) {{ C b = {{({real})f, 0}}; return a * b; }}
__device__ C over(C a, double n) {{
    {real} inverse = ({real})1 / ({real})n;
    return {{a.re * inverse, a.im * inverse}};
}}
"""
_SINGLE = """
typedef {storage} S;
typedef {compute} C;
__device__ C times(C a, double f) {{ return a * (C)f; }}
__device__ C over(C a, double n) {{ return a / (C)n; }}
"""
_BODY = """
__device__ C load(S s) {{ {load} }}
__device__ S store(C c) {{ {store} }}
__device__ C combine(C a, C b) {{ return {combine}; }}
extern "C" __global__ void fold(
    S* out, long long count, double factor, double divisor, {parameters}
) {{
    long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride) {{
        C sum = {first};
{rest}
        out[i] = store({last});
    }}
}}
"""
#: no fused multiply-add: it would round once where the CPU rounds twice
OPTIONS = ("--fmad=false",)


def kernels_for(dtype: torch.dtype) -> bool:
    """Whether there is a kernel for this type."""
    return dtype in _FLOATS or dtype in _COMPLEX or dtype in _INTEGERS or dtype in _BYTES


def source(op: ReduceOp, dtype: torch.dtype, count: int, *, scaled: bool) -> str:
    """The CUDA source of the fold of `count` contributions; with a factor for each if `scaled`."""
    combine = _COMBINE[op]
    if dtype in _COMPLEX:
        head = _PAIR.format(real=_COMPLEX[dtype])
    else:
        if dtype in _FLOATS:
            storage, compute = _FLOATS[dtype]
        elif dtype in _BYTES:
            storage = compute = "unsigned char"
            combine = _BOOL.get(op, combine) if dtype is torch.bool else combine
        else:
            signed = op in (ReduceOp.MIN, ReduceOp.MAX)
            storage = compute = ("signed " if signed else "unsigned ") + _INTEGERS[dtype]
        head = _SINGLE.format(storage=storage, compute=compute)
    factor = "times(load(p{0}[i]), factor)" if scaled else "load(p{0}[i])"
    return head + _BODY.format(
        load=_LOAD.get(dtype, "return s;"),
        store=_STORE.get(dtype, "return c;"),
        combine=combine,
        parameters=", ".join(f"const S* p{index}" for index in range(count)),
        first=factor.format(0),
        rest="\n".join(
            f"        sum = combine(sum, {factor.format(index)});" for index in range(1, count)
        ),
        last="over(sum, divisor)" if op is ReduceOp.MEAN else "sum",
    )


@lru_cache(maxsize=1)
def cupy() -> Any:
    """CuPy, or None where the extra `cuda` is not installed, or finds no device or compiler."""
    try:
        import cupy as found

        found.cuda.runtime.getDeviceCount()
        found.cuda.nvrtc.getVersion()  # which compiles the kernels
    except Exception:  # noqa: BLE001 — a broken CUDA installation raises many things
        return None
    return found


@lru_cache(maxsize=256)
def _kernel(op: ReduceOp, dtype: torch.dtype, count: int, scaled: bool) -> Any:
    return cupy().RawKernel(source(op, dtype, count, scaled=scaled), "fold", OPTIONS)


def launch(
    out: torch.Tensor,
    sources: list[torch.Tensor],
    op: ReduceOp,
    factor: float | None,
    stream: torch.cuda.Stream,
) -> None:
    """Fold `sources` into `out`, which may be one of them, on a stream of their device."""
    kernel = _kernel(op, out.dtype, len(sources), factor is not None)
    count = out.numel()
    blocks = min(_BLOCKS, -(-count // _THREADS))
    numbers = (1.0 if factor is None else float(factor), float(len(sources)))
    pointers = [source.data_ptr() for source in sources]
    index = out.device.index
    with cupy().cuda.Device(index), _stream(stream):
        kernel((blocks,), (_THREADS,), (out.data_ptr(), count, *numbers, *pointers))


def _stream(stream: torch.cuda.Stream) -> Any:
    """The same stream as CuPy's; from version 14 on by the stream protocol."""
    streams = cupy().cuda
    if hasattr(streams.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
        return streams.Stream.from_external(stream)
    return streams.ExternalStream(stream.cuda_stream, stream.device_index)
