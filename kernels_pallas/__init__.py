"""Pallas Mosaic GPU kernels (Hopper and newer), one file per kernel: flat arrays in and out.

Every function takes `interpret=True` to run the same kernel on a CPU in Mosaic GPU interpret mode.
Sizes that are legal on paper but not written here raise NotImplementedError.
"""
