"""One module a figure: python -m benchmarks.NAME prints one JSON object on its last line.

A package, not a bare folder: google-jetstream installs a package of the same name, which would be found before one.
"""
