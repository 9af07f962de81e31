"""Shared by the commands and the benchmark: errors, tables, files to write, devices."""
