"""Calibration: what the probabilities that heads state are worth.

Per head a temperature, which makes them neither too sure nor too shy, and a coverage, the share of
true tokens that its draft vocabulary holds. Both depend on the temperature that the base model
samples at. This module is pure: fitting is `calibrating`'s job, files are `measured`'s.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from medusa_cli.decoding.traces import Provenance, damaged, parse, provenance_of

FORMAT = "medusa-calibration/1"


@dataclass(frozen=True, slots=True)
class HeadCalibration:
    """What heads are worth at one sampling temperature.

    Attributes:
        sampling_temperature: of the base model.
        temperatures: [K], what each head's logits are divided by.
        coverages: [K], share of true tokens that each head can draft.
    """

    sampling_temperature: float
    temperatures: tuple[float, ...]
    coverages: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a set of heads is worth, at rising sampling temperatures."""

    points: tuple[HeadCalibration, ...]

    def at(self, sampling_temperature: float) -> HeadCalibration:
        """Linear between the temperatures that were measured, the nearest one's outside."""
        at = [point.sampling_temperature for point in self.points]
        i = bisect_left(at, sampling_temperature)
        if i == 0 or i == len(at):
            return self.points[min(i, len(at) - 1)]
        low, high = self.points[i - 1], self.points[i]
        share = (sampling_temperature - at[i - 1]) / (at[i] - at[i - 1])
        return HeadCalibration(
            sampling_temperature,
            _between(low.temperatures, high.temperatures, share),
            _between(low.coverages, high.coverages, share),
        )


def uncalibrated(num_heads: int) -> Calibration:
    """Takes every head at its word."""
    return Calibration((HeadCalibration(0.0, (1.0,) * num_heads, (1.0,) * num_heads),))


def to_json(calibration: Calibration, provenance: Provenance) -> str:
    """JSON of the format `medusa-calibration/1`."""
    data = {"format": FORMAT, "provenance": asdict(provenance), **asdict(calibration)}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class KeptCalibration:
    """A calibration with what it was measured on."""

    provenance: Provenance
    calibration: Calibration


def from_json(content: str, where: str) -> KeptCalibration:
    """Reads what `to_json` wrote.

    Raises:
        CheckpointError: it is damaged, or something else.
    """
    data = parse(content, FORMAT, where)
    points = data.get("points")
    if not isinstance(points, list) or not points:
        raise damaged(where, "it has no points")
    read = tuple(_point(point, where) for point in points)
    at = [point.sampling_temperature for point in read]
    if at != sorted(set(at)) or len({len(point.temperatures) for point in read}) > 1:
        raise damaged(where, "its points do not fit together")
    return KeptCalibration(provenance_of(data, where), Calibration(read))


def _point(data: Any, where: str) -> HeadCalibration:
    try:
        point = HeadCalibration(
            float(data["sampling_temperature"]),
            tuple(map(float, data["temperatures"])),
            tuple(map(float, data["coverages"])),
        )
    except (TypeError, ValueError, KeyError):
        raise damaged(where, "a point is not whole") from None
    whole = len(point.temperatures) == len(point.coverages) > 0
    positive = all(0 < value < 1e3 for value in point.temperatures)
    if not (whole and positive and all(0 <= value <= 1 for value in point.coverages)):
        raise damaged(where, "a point holds what is no temperature or coverage")
    return point


def _between(low: Sequence[float], high: Sequence[float], share: float) -> tuple[float, ...]:
    return tuple(a * (1 - share) + b * share for a, b in zip(low, high, strict=True))
