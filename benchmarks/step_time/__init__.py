"""How long does a step take, in which loop, and what can it not fall below?"""
