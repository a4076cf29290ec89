"""Pictures of a chat request: part of a message -> bytes -> picture -> patches for the vision tower.

    source        a content part -> where its picture is (JSON only)
    settings      what the model and the command line say about pictures
    data_url      data URL -> bytes
    remote        https URL -> bytes, where that is allowed, from public addresses only
    decode        bytes -> size (before anything is decoded) -> upright RGB picture
    process       picture -> the size that the model wants -> patches
    placeholders  which tokens of a prompt stand for pictures, and which are text of the user that spells them
    reader        all of it for one request, off the event loop

Every fault of a picture is a RequestError that names its part; no message and no log line holds any of its bytes.
"""
