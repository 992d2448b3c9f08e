"""What releases a package of this repository: ``hatch run release:check core``.

Everything that a release does and that needs no credentials runs on a developer's
machine. The workflows in .github/workflows call the same commands and add two things:
the upload and the page of the release.
"""
