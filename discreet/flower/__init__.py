"""The code that depends on Flower: DPFedAvg, the transports, the codecs, `secure_sum_mod`."""
