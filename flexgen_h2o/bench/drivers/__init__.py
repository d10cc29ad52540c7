"""One module for each engine that is measured. All have `load(settings) -> Loaded`, see `common`."""
