"""Codecs: buckets, layouts of messages, and the engines that compute them on any device."""
