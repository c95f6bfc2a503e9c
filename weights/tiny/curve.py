"""Draw a training's loss and accuracy as a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw

WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 830, 40, 420
LOSS, ACCURACY, GRID, INK = "#1f5fa8", "#c2571a", "#dddddd", "#333333"


def draw_curve(history: Sequence[dict[str, float]], file: Path) -> None:
    """Loss on a logarithmic scale at the left, the accuracy where it was measured in percent at the right; by step.

    history: records with step, loss and sometimes accuracy.
    """
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    last = history[-1]["step"]
    exponents = [math.log10(max(record["loss"], 1e-6)) for record in history]
    low, high = math.floor(min(exponents)), max(math.ceil(max(exponents)), math.floor(min(exponents)) + 1)

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / last

    def y(part: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * part

    for exponent in range(low, high + 1):
        place = y((exponent - low) / (high - low))
        draw.line([(LEFT, place), (RIGHT, place)], GRID)
        draw.text((LEFT - 8, place), f"{10.0**exponent:g}", LOSS, anchor="rm")
    for quarter in range(5):
        draw.text((x(last * quarter / 4), BOTTOM + 14), f"{last * quarter // 4:g}", INK, anchor="mm")
        draw.text((RIGHT + 8, y(quarter / 4)), f"{25 * quarter} %", ACCURACY, anchor="lm")
    draw.rectangle([LEFT, TOP, RIGHT, BOTTOM], outline=INK)
    draw.text((LEFT, TOP - 16), "loss", LOSS, anchor="lm")
    draw.text((RIGHT, TOP - 16), "held-out problems answered exactly", ACCURACY, anchor="rm")
    draw.text(((LEFT + RIGHT) / 2, BOTTOM + 36), "step", INK, anchor="mm")

    losses = [
        (x(record["step"]), y((value - low) / (high - low))) for record, value in zip(history, exponents, strict=True)
    ]
    draw.line(losses, LOSS, width=1)
    checks = [(x(record["step"]), y(record["accuracy"])) for record in history if "accuracy" in record]
    draw.line(checks, ACCURACY, width=3)
    for place in checks:
        draw.circle(place, 4, ACCURACY)
    image.save(file, optimize=True)
