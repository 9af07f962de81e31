"""The exceptions that dlattn raises besides Python's own."""


class UnsupportedError(ValueError):
    """An argument has a value that is wrong, or that no kernel provides.

    Raised before anything is launched. The message names the argument, the value got and what is
    accepted.
    """

    __module__ = "dlattn"


class DeviceError(RuntimeError):
    """The device, its driver or a launch failed, or there is no such device."""

    __module__ = "dlattn"
