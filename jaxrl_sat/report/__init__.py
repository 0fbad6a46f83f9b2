"""Pictures of a run from its work folder."""
