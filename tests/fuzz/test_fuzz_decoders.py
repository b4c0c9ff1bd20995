"""Damaged messages: a small helping of `make fuzz`, and proof that it would notice."""

from __future__ import annotations

import pytest

from schemas.errors import InvalidRecord
from tests.fuzz.__main__ import main
from tests.fuzz.drill import Drill
from tests.unit.schemas import make_examples


def test_only_typed_errors_come_out_and_nothing_of_a_refused_record_is_used() -> None:
    tally = Drill(7).run(3000)

    assert tally.untyped == []
    assert tally.misused == []
    assert tally.records == tally.accepted + tally.refused >= 2990
    assert len(tally.codes) > 50, "the damage reaches deep into the checks"


def test_an_error_of_another_type_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = make_examples.decode_heartbeat

    def careless(value: bytes | None) -> object:
        try:
            return decode(value)
        except InvalidRecord as error:
            raise KeyError("type") from error

    monkeypatch.setattr(make_examples, "decode_heartbeat", careless)

    assert main(["--records", "200"]) == 1
    assert "KeyError" in capsys.readouterr().out


def test_a_refused_record_whose_rows_are_held_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    from consumers.trainer.desk import Desk

    take_poison = Desk.take_poison

    def salvage(self: Desk, record: object, error: InvalidRecord, now_us: int) -> None:
        take_poison(self, record, error, now_us)  # type: ignore[arg-type]
        self.decisions.append(self.decisions[-1].__class__(**{
            **{name: getattr(self.decisions[-1], name) for name in self.decisions[-1].__slots__}, "subject": "group",
        }))  # fmt: skip

    monkeypatch.setattr(Desk, "take_poison", salvage)

    assert Drill(7).run(200).misused != []
