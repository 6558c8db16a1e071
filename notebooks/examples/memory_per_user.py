"""One model, a memory for each user: states in files of constant size that outlive the process.

    python memory_per_user.py --folder users

Two users talk in turns, and the program "restarts" before every turn. A user's next answer is the one that a model
gives which has read that user's whole conversation, though a turn sends what is new alone. `hecate serve` does this
behind OpenAI's protocol.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from hecate import states
from hecate.models import LanguageModel
from hecate.serve import Memories, Request, Scheduler

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--folder", type=Path, help="of the users' files; a temporary one if left out")
given = parser.parse_args()
folder = given.folder or Path(tempfile.mkdtemp())

# In place of yours: `hecate.train.open_model("runs/mine").model`.
model = LanguageModel(
    {"vocab_size": 256, "d_model": 64, "layers": 2, "heads": 2, "memory": "titans_linear"},
    generator=torch.Generator().manual_seed(0),
)
mark = states.fingerprint(model)  # files of another model are refused
conversations: dict[str, list[int]] = {}


def answer(user, text):
    """The next 8 tokens for this user, in a program that has just started."""
    memories = Memories(folder, mark)
    scheduler = Scheduler(model, memories=memories)
    request = scheduler.submit(Request(list(text), max_tokens=8, user=user))
    while scheduler.step():
        pass
    memories.close()
    return list(request.made)


for turn, (user, text) in enumerate([("ada", b"I am Ada. "), ("bob", b"Bob here. "), ("ada", b"Who am I? "),
                                     ("bob", b"And I? "), ("ada", b"Still? ")]):  # fmt: skip
    made = answer(user, text)
    told = conversations.setdefault(user, [])
    told += list(text)
    with torch.no_grad():  # all that this user has said and been told, read at once
        logits, state = model(torch.tensor([told]))
        for token in made:
            assert int(logits[0, -1].argmax()) == token, "the memory differs from the whole conversation"
            logits, state = model(torch.tensor([[token]]), state)
    told += made
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"turn {turn}  {user}: as after reading {len(told)} tokens; {size / 1e3:.0f} kB on disk for all users")
