"""Collections of the Hub: lists of models that belong together."""

from huggingface_hub import HfApi

from hf_recurrent_lengthgen.hub.remote import again


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
    owner = repo_id.partition("/")[0]

    def slug_of_title() -> str:
        # listed before each try, for an answer may get lost after the collection was made
        listed = api.list_collections(owner=owner)
        found = next((one.slug for one in listed if one.title == collection), None)
        return found or str(api.create_collection(collection, namespace=owner, private=private, exists_ok=True).slug)

    slug = collection if "/" in collection else again(slug_of_title, f"Making the collection {collection} of {owner}")
    doing = f"Adding {repo_id} to the collection {collection}"
    return str(again(lambda: api.add_collection_item(slug, repo_id, "model", exists_ok=True), doing).url)
