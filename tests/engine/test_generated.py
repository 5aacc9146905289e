"""Generated: its columns are cut and copied together, through all that happens to a sequence."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jpaged.engine.generated import Generated
from tests.engine.host import Host
from tests.engine.mock import Form, generated

KEPT = [np.array([10 + i, -1], np.int32) for i in range(4)]


def prompt(length: int) -> list[int]:
    return list(range(1, length + 1))


def table(count: int = 4) -> Generated:
    drawn = Generated()
    for i in range(count):
        kept = KEPT[i], -i / 4
        drawn.append(10 + i, -float(i), 7 + i // 2, [(10 + i, -float(i), 1)], -i / 8, kept)
    return drawn


def columns(drawn: Generated) -> dict[str, list[Any]]:
    return {field.name: getattr(drawn, field.name) for field in dataclasses.fields(drawn)}


def test_every_column_has_every_token():
    drawn = table()
    assert len(drawn) == 4 and drawn.weight_versions == [7, 7, 8, 8]
    assert {len(column) for column in columns(drawn).values()} == {4}, "append fills every column"


def test_truncate_cuts_every_column():
    drawn, whole = table(), columns(table())
    drawn.truncate(2)
    assert columns(drawn) == {name: column[:2] for name, column in whole.items()}


def test_slices_and_copies_are_apart():
    drawn, whole = table(), columns(table())
    assert columns(drawn.slice(1, 3)) == {name: column[1:3] for name, column in whole.items()}
    twin = drawn.copy()
    assert twin == drawn
    twin.append(5, -1.0, 9, [], 0.0)
    twin.truncate(1)
    assert columns(drawn) == whole and twin != drawn


def test_columns_that_nobody_asks_for_stay_empty():
    drawn = Generated()
    drawn.append(1, -0.5, 3)
    drawn.append(2, -0.5, 3)
    assert drawn.slice(1) == Generated([2], [-0.5], [3]) and not drawn.top_logprobs


@pytest.mark.parametrize("options", [{}, {"logprobs": 2}], ids=str)
def test_each_token_has_the_version_of_the_weights_that_drew_it(depth: int, options: dict):
    host = Host(depth)
    seqs = [host.add(prompt(6), 9, **options), host.add(prompt(7), 9, structured=Form())]
    while seqs[0].num_generated < 3:
        host.step()
    in_flight = [seq.pending for seq in seqs]  # they were drawn by the old weights
    known = [len(seq.generated) for seq in seqs]
    host.runner.era = 5
    host.run()
    for seq, pending, before in zip(seqs, in_flight, known, strict=True):
        old = before + (0 if seq.structured is not None else pending)
        versions = seq.generated.weight_versions
        assert len(versions) == 9 and versions == sorted(versions)
        # A draw under masks starts late: the one in flight may be of either.
        assert versions[:old] == [0] * old and set(versions[before + pending :]) == {5}


def test_preempted_and_begun_again_a_token_keeps_its_version(depth: int):
    host = Host(depth, num_blocks=8)
    seq = host.add(prompt(6), 12)
    while seq.num_generated < 4:
        host.step()
    host.runner.era = 1
    host.engine.recover()  # what is in flight is drawn again
    kept = seq.num_generated
    assert seq.generated.weight_versions == [0] * kept and len(seq.generated) == kept
    host.run()
    assert seq.generated.weight_versions == [0] * kept + [1] * (12 - kept)
    assert seq.generated.token_ids == generated(seq)


def test_beams_carry_the_versions_of_their_tokens(depth: int):
    host = Host(depth)
    search = host.add_beams(prompt(6), 3, 8)
    while search.sequences[0].num_generated < 3:
        host.step()
    host.runner.era = 2
    host.run()
    for hypothesis in search.results():
        versions = hypothesis.generated.weight_versions
        assert len(versions) == 8 and versions == sorted(versions) and set(versions) == {0, 2}
