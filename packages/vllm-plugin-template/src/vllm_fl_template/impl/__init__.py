"""The operators, by kind: functions with the signatures of their contracts."""
