"""Loading plug-ins so that a broken one costs the user that plug-in alone."""
