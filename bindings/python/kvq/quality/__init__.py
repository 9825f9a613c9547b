"""Every recipe measured on a small language model: python -m kvq.quality"""
