"""Figures on their way: told until the hub has them, and no more parcels than a few."""

from serving.gateway.figures import MAX_UNTOLD_PARCELS, Outbox
from serving.gateway.precision_record import ModelFigures

EMPTY = ModelFigures({"fp16": {}}, {})


class Model:
    """Something that compares rows: one figure each time."""

    def __init__(self) -> None:
        self.figures: list[float] = []

    def take(self) -> dict[str, ModelFigures]:
        taken, self.figures = self.figures, []
        return {"m": ModelFigures({"fp16": {"rel_l2": tuple(taken)} if taken else {}}, {}), "idle": EMPTY}


def figures_in(outbox: Outbox) -> list[tuple[int, tuple[float, ...]]]:
    """Number and figures of each parcel."""
    return [
        (parcel.number, parcel.figures["m"].tiers["fp16"]["rel_l2"])  # type: ignore[misc]
        for parcel in outbox.parcels()
    ]


def test_nothing_is_no_parcel() -> None:
    """A beat without figures stays small."""
    assert Outbox(Model().take).parcels() == ()


def test_a_parcel_is_told_until_the_hub_has_it() -> None:
    """With what came since behind it."""
    model = Model()
    outbox = Outbox(model.take)
    model.figures = [1.0]
    assert figures_in(outbox) == [(1, (1.0,))]
    model.figures = [2.0, 3.0]
    first = outbox.parcels()
    assert [parcel.number for parcel in first] == [1, 2]
    assert set(first[0].figures) == {"m"}
    model.figures = [4.0]
    later = outbox.parcels()
    outbox.told(first)
    assert figures_in(outbox) == [(3, (4.0,))]
    outbox.told(later)
    outbox.told(first)
    assert outbox.parcels() == ()


def test_while_the_hub_is_away_figures_stay_with_their_model() -> None:
    """Which keeps a bounded number of them."""
    model = Model()
    outbox = Outbox(model.take)
    for number in range(10):
        model.figures.append(float(number))
        parcels = outbox.parcels()
    assert len(parcels) == MAX_UNTOLD_PARCELS
    assert model.figures == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    outbox.told(parcels)
    assert figures_in(outbox) == [(5, (4.0, 5.0, 6.0, 7.0, 8.0, 9.0))]
