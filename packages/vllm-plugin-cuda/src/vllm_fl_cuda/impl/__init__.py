"""The operators, by kind: functions with the operators' signatures, and their predicates.

A predicate ``supports_<operator>`` returns True or a sentence. What a kernel cannot
read but a copy mends is copied; what stays is refused.
"""
