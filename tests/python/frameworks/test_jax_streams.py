"""JAX on a GPU, as far as it can be told without one: fakes play its streams and events."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest

import dlattn
from dlattn import _core


class FakeEvents:
    """The enqueued work, in order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []


class FakeJaxDevice:
    platform = "gpu"


class FakeJaxArray:
    """An array that logs the streams it is exported to."""

    def __init__(self, events: FakeEvents, name: str) -> None:
        self.events = events
        self.name = name
        self.ready = False

    def devices(self) -> set[FakeJaxDevice]:
        return {FakeJaxDevice()}

    def is_ready(self) -> bool:
        return self.ready

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int) -> str:
        self.events.log.append(("export", (self.name, stream)))
        return f"capsule of {self.name}"


@pytest.fixture
def fake_jax(monkeypatch):
    from dlattn.frameworks.jax import Jax

    events = FakeEvents()
    streams = iter(range(100, 1000))

    def from_dlpack(exporter: Any) -> FakeJaxArray:
        assert exporter.__dlpack_device__() == (2, 0)
        stream = next(streams)
        capsule = exporter.__dlpack__(stream=stream)
        events.log.append(("import", (capsule, stream)))
        return FakeJaxArray(events, capsule.replace("relayed capsule of", "result"))

    class Dlpack:
        pass

    class Module:
        dlpack = Dlpack

    Dlpack.from_dlpack = staticmethod(from_dlpack)
    monkeypatch.setitem(sys.modules, "jax", Module)
    monkeypatch.setattr(_core, "relay", lambda capsule: f"relayed {capsule}")
    framework = Jax()
    monkeypatch.setattr(
        framework, "empty", lambda like, shape, dtype: FakeJaxArray(events, f"sentinel {shape}")
    )
    return framework, events


class Memory:
    """Stands for the capsule of an input."""


def test_jax_on_a_gpu_is_ordered_by_its_own_streams(fake_jax):
    framework, events = fake_jax

    def launch(stream: int) -> tuple[list[Any], list[Any]]:
        events.log.append(("launch", stream))
        return [FakeJaxArray(events, "out"), FakeJaxArray(events, "lse")], [Memory()]

    outputs = framework.run(FakeJaxArray(events, "q"), launch)
    assert [x.name for x in outputs] == ["result out", "result lse"]
    assert events.log == [
        ("launch", 100),  # on the stream that JAX waits for
        ("export", ("out", 100)),
        ("import", ("relayed capsule of out", 100)),
        ("export", ("result out", 101)),  # lse's stream waits for the kernel
        ("export", ("lse", 101)),
        ("import", ("relayed capsule of lse", 101)),
        ("export", ("result out", 102)),
        ("export", ("sentinel (1,)", 102)),
        ("import", ("relayed capsule of sentinel (1,)", 102)),
    ]


def test_jax_memory_is_held_until_the_kernel_is_done(fake_jax):
    framework, events = fake_jax
    watched = []

    def launch(stream: int) -> tuple[list[Any], list[Any]]:
        memory = Memory()
        watched.append(weakref.ref(memory))
        return [FakeJaxArray(events, "out")], [memory]

    for _ in range(3):
        framework.run(FakeJaxArray(events, "q"), launch)
    assert all(memory() for memory in watched)
    framework._in_flight[0][0].ready = True
    framework.run(FakeJaxArray(events, "q"), launch)
    assert [memory() is not None for memory in watched] == [False, True, True, True]
    for sentinel in [entry[0] for entry in framework._in_flight]:
        sentinel.ready = True
    framework.run(FakeJaxArray(events, "q"), launch)
    assert [memory() is not None for memory in watched] == [False] * 4 + [True]


def test_jax_memory_is_held_though_threads_meet(fake_jax):
    framework, events = fake_jax

    class MeetsAnother(FakeJaxArray):
        """While one thread asks whether this is ready, another one clears up."""

        met = False

        def is_ready(self) -> bool:
            if not self.met:
                self.met = True
                framework._release()
            return True

    used = FakeJaxArray(events, "in use")
    framework._in_flight.extend([(MeetsAnother(events, "done"), []), (used, [])])
    framework._release()
    assert [entry[0] for entry in framework._in_flight] == [used]


def test_jax_errors_before_the_launch_come_out(fake_jax):
    framework, events = fake_jax

    def launch(stream: int) -> tuple[list[Any], list[Any]]:
        raise dlattn.UnsupportedError("no kernel")

    with pytest.raises(dlattn.UnsupportedError, match="no kernel"):
        framework.run(FakeJaxArray(events, "q"), launch)
    assert events.log == [] and not framework._in_flight
