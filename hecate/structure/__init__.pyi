from hecate.structure.base import Memory as Memory
from hecate.structure.base import Structure as Structure
from hecate.structure.base import StructureKind as StructureKind
from hecate.structure.layered import MLP as MLP
