"""The allocation policies of FORMATS section 6, as pure functions of statistics or scores."""
