"""The bill of materials of a wheel, in CycloneDX's JSON."""

from __future__ import annotations

import email
import uuid
import zipfile
from typing import TYPE_CHECKING

from cyclonedx.model import HashAlgorithm
from cyclonedx.model import HashType
from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component
from cyclonedx.model.component import ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

from tools.release.build import digest
from tools.release.packages import ReleaseError

if TYPE_CHECKING:
    from pathlib import Path


def write_sbom(wheel: Path, out: Path) -> Path:
    """Write the bill of materials of a wheel and return its path.

    The wheels are pure Python and carry no one else's code, so it names the wheel, by
    its hash, and what it asks for. Which versions those are is decided where it is
    installed. The same wheel gives the same bytes.
    """
    headers = _metadata(wheel)
    sha256 = digest(wheel)
    subject = Component(
        type=ComponentType.LIBRARY,
        name=headers["Name"],
        version=headers["Version"],
        description=headers["Summary"],
        purl=PackageURL("pypi", name=headers["Name"], version=headers["Version"]),
        bom_ref=wheel.name,
        licenses=[LicenseExpression(headers["License-Expression"])],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)],
    )
    requirements = [_component(Requirement(line)) for line in headers.get_all("Requires-Dist", ())]
    bom = Bom(components=requirements, serial_number=uuid.uuid5(uuid.NAMESPACE_OID, sha256))
    bom.metadata.component = subject
    bom.register_dependency(subject, requirements)
    # The time would be another one in every build.
    bom.metadata.timestamp = None  # type: ignore[assignment, unused-ignore]
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        raise ReleaseError(f"the bill of materials of {wheel.name} is not valid CycloneDX: {problem}")
    path = out / f"{wheel.stem}.cdx.json"
    path.write_text(f"{text}\n", encoding="utf-8")
    return path


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def _component(requirement: Requirement) -> Component:
    return Component(
        type=ComponentType.LIBRARY,
        name=requirement.name,
        purl=PackageURL("pypi", name=requirement.name),
        bom_ref=str(requirement),
        properties=[Property(name="python:requirement", value=str(requirement))],
    )
