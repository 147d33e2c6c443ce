"""Collections of the Hub: lists of models that belong together."""

from typing import Any

from huggingface_hub import HfApi

from hf_recurrent_lengthgen.hub.remote import again, once


def add_to_collection(api: HfApi, collection: str, repo_id: str, private: bool = True) -> str:
    """Add a model to a collection, once.

    Args:
        api: The client.
        collection: Slug of a collection (owner/title-and-number, as in its address), or the title of one of the
            model's owner; without one of that title it is made.
        repo_id: The model, owner/name.
        private: Of a collection that is made.

    Returns:
        The address of the collection.

    Raises:
        ValueError: if the Hub refuses or fails.
    """
    doing = f"Adding {repo_id} to the collection {collection}"
    found: Any = None
    slug = collection if "/" in collection else None
    owner = repo_id.partition("/")[0]
    if slug is None:
        listed = once(lambda: list(api.list_collections(owner=owner)), f"Listing the collections of {owner}")
        slug = next((one.slug for one in listed if one.title == collection), None)
    if slug is None:
        found = again(
            lambda: api.create_collection(collection, namespace=owner, private=private, exists_ok=True),
            f"Creating the collection {collection}",
        )
        slug = found.slug
    chosen = slug
    found = again(lambda: api.add_collection_item(chosen, repo_id, "model", exists_ok=True), doing)
    return str(found.url)
