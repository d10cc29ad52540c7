"""Facts without torch: what is asked for, how a block is cut and scheduled, where things live, how large they are."""
