"""Let torch's generator for the CPU give up numbers: few by drawing them, many by a jump.

[Note: Jumps]
The generator is MT19937. It makes each word of 32 bits from the 624 words before it, and a number
by mixing the bits of one word ("tempering"). Both are linear over the field of two elements. So
with polynomials over that field, number k + n is the exclusive or of the numbers k + i for which
x**i is in the remainder of x**n divided by the characteristic polynomial, whose degree is 19937. A
jump draws 33 * 624 numbers and adds up the 624 numbers n further on, by a table of the 16 sums of 4
neighbours. Their words become the generator's state. A jump of any distance takes 1 ms, as 600
thousand draws do; the first one of a distance takes 3 ms. Polynomials are integers of Python: bit i
is the coefficient of x**i.

torch does not document the generator's state. A jump is made only if the state holds the words of
the numbers that were just drawn; otherwise all numbers are drawn. See Haramoto, Matsumoto,
Nishimura, Panneton and L'Ecuyer, "Efficient jump ahead for F2-linear random number generators".
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_BLOCK, _MIDDLE, _DEGREE = 624, 397, 19937
_TWIST = 0x9908B0DF
_DRAWN = 33 * _BLOCK  # numbers: all that a remainder may add up
_WIDTH = _DRAWN - 4  # sums in a table
_STATE_NBYTES = 5056
_NEXT, _WORDS = 2, slice(3, 3 + _BLOCK)  # of the state as int64: index of the next word, the words
_CHUNK = 1 << 16  # numbers given up at a time: their memory stays in the processor's cache
FEWEST_NUMBERS = 1 << 20  # that a jump gives up sooner than draws do


def pass_over(count: int, generator: torch.Generator | None) -> None:
    """Let a generator, or torch's own, give up `count` numbers of 32 bits."""
    if count >= FEWEST_NUMBERS:
        count -= _jump(count, generator or torch.default_generator)
    scratch = torch.empty(min(count // 2, _CHUNK // 2), dtype=torch.int64)
    while count > 1:
        taken = scratch[: count // 2].random_(-(2**63), None, generator=generator)
        count -= 2 * taken.numel()
    if count:
        torch.empty(1, dtype=torch.int32).random_(generator=generator)


def _jump(count: int, generator: torch.Generator) -> int:
    """Give up most of `count` numbers, `FEWEST_NUMBERS` or more, and return how many were."""
    state = generator.get_state()
    if state.nbytes != _STATE_NBYTES:
        return 0
    passed = _BLOCK - int(state.view(torch.int64)[_NEXT])  # of this block
    pass_over(passed, generator)
    drawn = torch.empty(_DRAWN // 2, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    numbers = drawn.view(torch.int32).view(-1, 2).flip(1).view(-1)  # the upper half comes first
    state = generator.get_state()
    num_blocks = count // _BLOCK - 2
    ahead = _numbers_ahead(numbers, num_blocks * _BLOCK)
    last_words, words = _untempered(torch.stack([numbers[-_BLOCK:], ahead]))
    known_words = state.view(torch.int64)[_WORDS]
    if not torch.equal(known_words, last_words):
        return passed + _DRAWN
    known_words.copy_(words)
    generator.set_state(state)
    return passed + (num_blocks + 1) * _BLOCK


def _untempered(numbers: Tensor) -> Tensor:
    """Return the words, as int64, from which numbers were drawn."""
    words = numbers.long() & 0xFFFFFFFF
    for shift, mask in ((-18, -1), (15, 0xEFC60000), (7, 0x9D2C5680), (-11, -1)):
        mixed = words
        for _ in range(32 // abs(shift)):  # each time `shift` more bits are right
            moved = words << shift if shift > 0 else words >> -shift
            words = mixed ^ (moved & mask)
    return words


def _numbers_ahead(numbers: Tensor, distance: int) -> Tensor:
    """Return the 624 numbers that come `distance` after the first ones of `numbers`."""
    sums = numbers.new_zeros(16, _WIDTH)  # row 5: number k plus number k + 2
    for bit in range(4):
        shifted = numbers[bit : bit + _WIDTH]
        torch.bitwise_xor(sums[: 1 << bit], shifted, out=sums[1 << bit : 2 << bit])
    pairs = sums.view(torch.int64).view(-1)
    windows = pairs.as_strided((pairs.numel() - _BLOCK // 2 + 1, _BLOCK // 2), (1, 1))
    total = pairs.new_zeros(128, _BLOCK // 2)  # with a chunk it fits the processor's cache
    chunk = torch.empty_like(total)
    for starts in _window_starts(distance).split(len(total)):
        total ^= torch.index_select(windows, 0, starts, out=chunk)
    while len(total) > 1:
        total = total[::2] ^ total[1::2]
    return total.view(torch.int32).view(-1)


@functools.lru_cache(maxsize=64)  # 40 KB each
def _window_starts(distance: int) -> Tensor:
    """Return where the 39 * 128 windows begin whose sum is `distance` ahead, in pairs of words."""
    packed = bytearray(_power(distance).to_bytes(39 * 128 // 2, "little"))
    each = torch.frombuffer(packed, dtype=torch.uint8)
    digits = torch.stack([each & 15, each >> 4], 1).view(-1).long()
    return (digits * _WIDTH + 4 * torch.arange(len(digits))) // 2


def _power(exponent: int) -> int:
    """Return the remainder of x**exponent."""
    num_squares = max(exponent.bit_length() - 14, 0)
    power = 1 << (exponent >> num_squares)
    for bit in reversed(range(num_squares)):
        square = int(f"{power:b}", 4)  # a zero after each coefficient
        power = _remainder(square << (exponent >> bit & 1))
    return power


def _remainder(polynomial: int) -> int:
    """Return the remainder of a polynomial whose degree is at most twice the divisor's."""
    terms = _divisor_terms()
    # With divisor = x**d (1 + e), 1 / (1 + e) is (1 + e) (1 + e**2) (1 + e**4) ..., and e**2 has
    # the exponents of e, doubled. They are -623 or less: after six factors nothing is left of a
    # quotient's 19937 coefficients.
    quotient = polynomial >> _DEGREE
    for doubled in range(6):
        factor = quotient
        for term in terms:
            gap = (_DEGREE - term) << doubled
            if 0 < gap < _DEGREE:
                quotient ^= factor >> gap
    for term in terms:
        polynomial ^= quotient << term
    return polynomial


@functools.cache
def _divisor_terms() -> list[int]:
    """Return the exponents of the characteristic polynomial."""
    divisor = 1
    for bit in range(31):
        divisor = divisor << (_BLOCK - 1) ^ divisor << (_MIDDLE - 1) ^ (_TWIST >> bit & 1)
    divisor = divisor << _BLOCK ^ divisor << _MIDDLE ^ _TWIST >> 31
    return [bit for bit in range(_DEGREE + 1) if divisor >> bit & 1]
