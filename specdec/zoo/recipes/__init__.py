"""The recipes of the models that come with the package; `specdec zoo train OUT --recipe NAME` runs one."""
