"""A small language model answers over many kinds of quantized cache: python -m kvq.demo"""
