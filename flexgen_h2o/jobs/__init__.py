"""A batch job: prompts in, results out, interruptions survived, progress and a report."""
