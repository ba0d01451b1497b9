"""Two words that name a run."""

from __future__ import annotations

import secrets

ADJECTIVES = (
    "able amber ample brave bright brisk calm candid clear clever cosy crisp daring eager early fair fleet fond "
    "frank fresh gentle glad golden grand happy hardy honest humble jolly keen kind lively lucid lucky mellow merry "
    "mild neat nimble noble patient plain polite proud quick quiet ready robust rosy sharp silent silver smart snug "
    "solid spry steady stout sunny swift tidy warm wise witty"
)
ANIMALS = (
    "badger bear beaver bison bittern crane curlew deer dolphin dove eagle egret falcon ferret finch fox gecko goose "
    "grouse hare hawk heron ibex ibis jackdaw jay kestrel kite lark lemur linnet lynx marten mole moose newt orca "
    "oriole osprey otter owl panda pika plover puffin quail raven robin seal shrew sparrow starling stoat stork swan "
    "swift tern thrush toad trout turtle viper vole walrus weasel whale wombat wren yak"
)


def random_words() -> str:
    """Return an adjective and an animal, as in `brave-otter`."""
    return f"{secrets.choice(ADJECTIVES.split())}-{secrets.choice(ANIMALS.split())}"
