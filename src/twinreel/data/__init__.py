"""The data path: rows of a manifest to batches of frames and captions.

clip                        the contract: a row, a sample, a batch
manifest, tables, captions, sources   lists and data sets -> rows
storage                     a row's video: a file, an LMDB, a folder of images
decode                      seconds of a video -> frames; the only room that touches a decoder
sampling, choosing          windows and rules -> the seconds to look at
transforms                  crops, scaling, mirroring, normalizing
plan                        (seed, epoch, position) -> which sample comes when
dataset                     rows + rules -> samples
loader, shared_rows, read_ahead, device_feed, processes   samples -> batches, by reader processes
reading_costs               what reading a clip costs, stage by stage
preparation                 check, pack, extract, prepare a collection
founding_sampling, founding_transforms         the founding systems' rules, for parity
"""
