"""Examples for training, and the building of data sets, around one shard format.

One example is a caption and the codes of its picture. The process that reads ahead loads these modules without torch.
"""
