"""The audit: experiments that try to break a privacy claim, and the statistics that judge them."""
