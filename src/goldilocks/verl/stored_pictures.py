"""Pictures as bytes, and back, pixel by pixel. Only pixels are kept: no metadata, no file format."""

from __future__ import annotations

import io
import sys
from typing import Any

AS_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")  # the modes that a PNG file keeps as they are


def is_picture(value: object) -> bool:
    """Whether this is an image of PIL. Where PIL was never imported, nothing is."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(value, pil.Image)


def as_png(image: Any) -> bytes | None:
    """Return the file of a picture; None if PNG does not keep its mode as it is."""
    if image.mode not in AS_PNG:
        return None
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def from_png(data: bytes) -> Any:
    """Return the picture of a file that ``as_png`` wrote; no other format is opened."""
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=("PNG",))
    image.load()
    return image


def from_pixels(mode: str, size: tuple[int, int], pixels: bytes) -> Any:
    """Return the picture whose ``tobytes`` are these."""
    from PIL import Image

    return Image.frombytes(mode, size, pixels)
