"""Slow and obvious: numpy in float64, an expert at a time. Shares no code with the steps."""

from dgmoe_jax.reference.layer import activate, decode_fp8, encode_fp8, moe, route

__all__ = ["activate", "decode_fp8", "encode_fp8", "moe", "route"]
