"""The one loop in which text is generated, and the parts that it is put together from."""
