"""Mosaic GPU kernels: one file per kernel, flat arrays in, flat arrays out."""
