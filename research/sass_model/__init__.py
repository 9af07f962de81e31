"""Predicts the time of the wmma kernels from their machine code.

`sass` reads a listing and finds the loops, `devices` holds the rates of the GPUs, `simulate` runs a
multiprocessor's warps through the code clock by clock, `predict` puts tiles, blocks and waves
together, `kernels` fetches the code of a build, `calibrate` compares with measured times and
`report` prints.
"""
