"""From arguments to a call: how they are bound, guarded and refused."""
