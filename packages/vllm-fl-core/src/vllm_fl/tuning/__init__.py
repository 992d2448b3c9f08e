"""Measuring implementations, and writing down which one is the fastest.

``shapes`` and ``models`` say what is called, ``recipes`` makes the arguments,
``contenders`` lists who can be called, ``judging`` says whether a result is right,
``timing`` measures, ``bench`` runs the whole, ``table`` and ``page`` show it, and ``tune``
turns it into a tuned table. Needs torch; only the command imports it.
"""
