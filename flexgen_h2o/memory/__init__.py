"""The three tiers: allocation and the ledger, copies between them, files, and the memory that compute works in."""
