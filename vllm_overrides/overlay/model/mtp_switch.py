"""Whether the multi-token-prediction head is to be loaded: asked by the model and by the memory plan."""
import os

MTP_ASKED = "VLLM_OVERLAY_MTP"


def mtp_is_asked() -> bool:
    """Returns whether VLLM_OVERLAY_MTP is 1."""
    return os.environ.get(MTP_ASKED, "0") == "1"
