"""The share of misses that goes over a card's link: what the user says, or what two measured rates make it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from strata.config_sources import resolve_here
from strata.engine.link_share import choose_link_share


def asked(value: str | float) -> Any:
    return resolve_here(arguments={"pcie_frac": value})


def never() -> float:
    pytest.fail("nothing is measured here")


CARD = cast(Any, SimpleNamespace(machine=None, backend=None))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_that_the_user_gives_is_taken_unmeasured(share: float) -> None:
    """As a card holds it."""
    assert choose_link_share(asked(share), CARD, never, lambda _: never()) == float(np.float32(share))


def test_without_a_card_nothing_goes_over_a_link() -> None:
    assert choose_link_share(asked("auto"), None, never, lambda _: never()) == 0.0


@pytest.mark.parametrize(("link", "ram", "share"), [(50e9, 100e9, 1 / 3), (25e9, 75e9, 0.25), (50e9, 50e9, 0.5)])
def test_auto_ends_both_together(link: float, ram: float, share: float) -> None:
    found = choose_link_share(asked("auto"), CARD, lambda: ram, lambda _: link)
    assert found == pytest.approx(share)
    assert found / link == pytest.approx((1 - found) / ram)  # seconds of each side


def test_what_cannot_be_measured_leaves_all_to_the_cpu_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    def short_of_ram() -> float:
        raise MemoryError

    assert choose_link_share(asked("auto"), CARD, never, lambda _: None) == 0.0
    assert choose_link_share(asked("auto"), CARD, short_of_ram, lambda _: 50e9) == 0.0
    assert choose_link_share(asked("auto"), CARD, never) == 0.0  # an emulated card has no link
    told = [record.getMessage() for record in caplog.records]
    assert ["measure the link" in words for words in told] == [True, False, True]
    assert "measure RAM; --pcie-frac F gives a share" in told[1]
