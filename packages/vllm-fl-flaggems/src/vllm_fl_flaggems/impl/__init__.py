"""The operators, by kind: functions with the operators' signatures.

Importing one of these modules imports FlagGems, ``attention`` apart. What FlagGems
does not take is in :mod:`vllm_fl_flaggems.limits`, which imports nothing.
"""
