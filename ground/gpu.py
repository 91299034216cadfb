"""Detection of a GPU, by its driver alone or by torch."""

import ctypes

from .errors import Missing

NO_GPU = "this machine has no NVIDIA GPU with a driver"


def missing_gpu() -> str | None:
    """Return why the driver finds no GPU, None if it finds one. Faster than torch, which isn't imported."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_GPU
    return None if driver.cuInit(0) == 0 else NO_GPU


def require_cuda() -> None:
    """Raise Missing unless torch sees a CUDA device; the CPU is never used in its place."""
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            "this torch is built without CUDA" if built is None else f"torch (CUDA {built}) sees no device or driver"
        )
        raise Missing(f"a GPU was asked for and there is none: {reason}; ask for the CPU, or run where the GPU is")


def gpu_name(device: str) -> str | None:
    """Return the name of torch's GPU, None for the device cpu. Raises Missing as `require_cuda` does."""
    if device != "cuda":
        return None
    import torch

    require_cuda()
    name: str = torch.cuda.get_device_name()
    return name


def require_device(device: str) -> None:
    """Raise Missing for the device cuda if torch sees no GPU."""
    if device == "cuda":
        require_cuda()
