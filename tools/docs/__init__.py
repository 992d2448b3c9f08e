"""What the documentation takes from the code: ``python -m tools.docs`` writes it anew.

A page has places that begin with ``<!-- generated: NAME -->`` and end with
``<!-- /generated -->``. What stands between them is made here, in English or in
Chinese, and ``tests/docs`` fails where it is not what the code says now. The Chinese
of a string of the code is in ``chinese.yaml``, by its English.
"""
