"""What is drawn is fresh, of the size that was asked, and never given twice."""

from __future__ import annotations

from kvplane.dice import BITS_63, BLOCK_BYTES, Dice


def test_no_byte_is_given_twice_over_the_border_of_blocks() -> None:
    dice = Dice()
    drawn = [dice.hex_id() for _ in range(3 * BLOCK_BYTES // 12)]
    assert {len(one) for one in drawn} == {24} and len(set(drawn)) == len(drawn)
    assert set("".join(drawn)) == set("0123456789abcdef")


def test_numbers_fill_their_63_bits() -> None:
    dice = Dice()
    numbers = [dice.bits63() for _ in range(2000)]
    assert all(0 <= one <= BITS_63 for one in numbers) and len(set(numbers)) == 2000
    ones = 0
    for one in numbers:
        ones |= one
    assert ones == BITS_63


def test_two_dice_have_nothing_in_common() -> None:
    assert {Dice().hex_id() for _ in range(100)}.isdisjoint({Dice().hex_id() for _ in range(100)})
    assert len(Dice().hex_id()) == 24
