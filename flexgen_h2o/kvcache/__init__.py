"""The KV cache: buffers that are overwritten in place, the policies that choose what stays, units at their homes."""
