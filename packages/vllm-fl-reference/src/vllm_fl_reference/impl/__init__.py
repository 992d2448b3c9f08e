"""The operators, by kind: each module holds functions with the operators' signatures."""
