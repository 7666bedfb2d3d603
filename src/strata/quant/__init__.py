"""Block formats, the expert blob's layout and the exact arithmetic's definition. It knows no other room."""

from strata.quant.blocks import ExpertFormat, QuantisedMatrix, dequantise, quantise
from strata.quant.layout import ExpertLayout

__all__ = ["ExpertFormat", "ExpertLayout", "QuantisedMatrix", "dequantise", "quantise"]
