"""Where code written from the older guide looks for the base class."""
