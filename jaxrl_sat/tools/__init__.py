"""Programs of their own: `python -m jaxrl_sat.tools.NAME --help`."""
