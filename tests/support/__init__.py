"""What several test files need: tiny models, slow references, commands run as people do, jobs that are interrupted."""
