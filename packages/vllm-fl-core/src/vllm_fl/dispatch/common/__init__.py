"""What every room stands on: texts, locks, logs, files; it knows no operator."""
