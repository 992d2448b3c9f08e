"""The operators, by kind: functions with the operators' signatures, and their predicates.

``<operator>_layer`` is asked once for a layer, of what never changes for it: devices,
dtypes, last dimensions, weights, flags; ``<operator>_call`` of the rest, at every call.
They return True or a sentence, and take those of the operator's arguments that they look
at. What a kernel cannot read but a copy mends is copied; what stays is refused.
"""
