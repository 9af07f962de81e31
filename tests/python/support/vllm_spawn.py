"""A process that gets vLLM's choice of dlattn before it loads plug-ins, as vLLM's engine does.

A program, as multiprocessing imports what it spawns. Prints the member's name, if it is the one
that the new process has, and the exit code of that process.
"""

from __future__ import annotations

import importlib
import multiprocessing
from typing import Any

import module_stubs
import vllm_stub

THERE = module_stubs.installed(vllm_stub.MODULES)
THERE.__enter__()  # in both processes
REGISTRY = importlib.import_module("vllm.v1.attention.backends.registry")


def engine(config: dict[str, Any]) -> None:
    if config["backend"] is REGISTRY.AttentionBackendEnum["DLATTN"]:
        print(config["backend"].name, flush=True)


def main() -> None:
    from dlattn.integrations.vllm_plugin import register

    register()
    config = {"backend": REGISTRY.AttentionBackendEnum["DLATTN"]}
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(config,))
    process.start()
    process.join()
    print(process.exitcode)


if __name__ == "__main__":
    main()
