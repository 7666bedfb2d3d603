"""What a kept file of rates must hold, field by field, so that a damaged one is found before anything is divided by it.

Lives in ``engine`` beside ``rates.py``, which reads and writes the file and imports this only where there is one. It
must not know what a forecast does with the numbers; it knows that all of them are divisors, seconds or counts.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strata.engine.rates import FileCosts, LayerCosts, Rates
from strata.kernels.rates import KernelRates
from strata.memory.bandwidth import Bandwidths
from strata.quant import ExpertFormat

__all__ = ["parse_rates"]

# Far outside of what any machine does, and near enough that sums and quotients of all models stay finite.
Rate = Annotated[float, Field(ge=1, le=1e18, allow_inf_nan=False)]  # bytes or multiply-adds a second
Seconds = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1, le=1 << 60)]
Threads = Annotated[int, Field(ge=1, le=256)]  # as STRATA_STAGER_THREADS takes

RatesOfSizes = Annotated[dict[Size, Annotated[dict[Size, Rate], Field(min_length=1)]], Field(min_length=1)]
# Costs are read off the line through two sizes.
SecondsOfSizes = Annotated[dict[Size, Annotated[dict[Size, Seconds], Field(min_length=1)]], Field(min_length=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Bandwidths(_Strict):
    memory_read: Rate
    memory_copy: Rate
    single_copy: Rate
    stager_threads: Threads
    mapped_read: Rate | None
    drive_pieces: Rate | None


class _Linear(_Strict):
    """Every format that a pack's dense matrices may have."""

    q8_0: RatesOfSizes
    bf16: RatesOfSizes
    f32: RatesOfSizes


class _Kernels(_Strict):
    experts: Annotated[dict[ExpertFormat, RatesOfSizes], Field(min_length=1)]
    linear: _Linear
    attention: RatesOfSizes


class _LayerCosts(_Strict):
    a_round: Seconds
    a_row: Seconds
    a_pick: Seconds
    a_load: Seconds


class _FileCosts(_Strict):
    cached: SecondsOfSizes
    drive: SecondsOfSizes | None


class _Rates(_Strict):
    bandwidths: _Bandwidths
    kernels: _Kernels
    layers: Annotated[dict[str, _LayerCosts], Field(min_length=1)]
    file: _FileCosts | None


class _Kept(_Strict):
    key: dict[str, Any]
    rates: _Rates


def parse_rates(text: bytes, key: dict[str, Any]) -> Rates:
    """The rates in a file kept for ``key``. Raises ``ValueError`` that names the first field that cannot be."""
    try:
        kept = _Kept.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        what = first["msg"][:1].lower() + first["msg"][1:]
        raise ValueError(f"{place}: {what}" if place else what) from None
    if kept.key != key:
        raise ValueError("key: is of another machine, version or number of threads")
    found = kept.rates.model_dump()
    return Rates(
        Bandwidths(**found["bandwidths"]),
        KernelRates(**found["kernels"]),
        {family: LayerCosts(**costs) for family, costs in found["layers"].items()},
        None if found["file"] is None else FileCosts(**found["file"]),
    )
