"""All at the server that knows Flower: DPFedAvg, the transports, the codecs, `secure_sum_mod`."""
