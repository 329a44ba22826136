"""What the definitions of LeaderWorkerSet and Kueue say of the objects that we make, as JSON schemas.

No registry has these definitions. The schemas say which fields there are at each level that we use, of which type and
with which values, so that an unknown, misplaced or misspelt field fails; levels that we do not use end as OBJECT.

kind                                        read off, on 2026-11-20
LeaderWorkerSet v1                          kubernetes-sigs/lws at 024af084: api/leaderworkerset/v1
ClusterQueue, LocalQueue, ResourceFlavor    kubernetes-sigs/kueue at 00b014c1, 014868ba, 01ed66fd:
v1beta1                                     config/components/crd/bases; still served beside v1beta2, but deprecated
"""

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Schema = {"type": ["integer", "string"], "pattern": r"^[0-9.]+([KMGTPE]i?|m)?$"}
# `metadata` is checked as that of a ConfigMap; pod templates as those of a pod.
METADATA = POD_TEMPLATE = OBJECT


def of(*values: str) -> Schema:
    """One of these texts."""
    return {"enum": list(values)}


def items(schema: Schema) -> Schema:
    """A list of these."""
    return {"type": "array", "items": schema}


def fields(*required: str, **properties: Schema) -> Schema:
    """An object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def document(spec: Schema) -> Schema:
    """A whole object."""
    return fields("apiVersion", "kind", "metadata", "spec", apiVersion=TEXT, kind=TEXT, metadata=METADATA, spec=spec)


SELECTOR = fields(matchLabels=LABELS, matchExpressions=items(OBJECT))

SCHEMAS: Mapping[tuple[str, str], Schema] = {
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): document(
        fields(
            "leaderWorkerTemplate",
            replicas=NUMBER,
            leaderWorkerTemplate=fields(
                "workerTemplate",
                leaderTemplate=POD_TEMPLATE,
                workerTemplate=POD_TEMPLATE,
                size={"type": "integer", "minimum": 1},
                # "Default" is deprecated.
                restartPolicy=of("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
                subGroupPolicy=fields(subGroupPolicyType=of("LeaderWorker", "LeaderExcluded"), subGroupSize=NUMBER),
                volumeClaimTemplates=items(OBJECT),
                persistentVolumeClaimRetentionPolicy=OBJECT,
            ),
            rolloutStrategy=fields(
                "type",
                type=of("RollingUpdate"),
                rollingUpdateConfiguration=fields(partition=NUMBER, maxUnavailable=QUANTITY, maxSurge=QUANTITY),
            ),
            startupPolicy=of("LeaderCreated", "LeaderReady"),
            networkConfig=fields("subdomainPolicy", subdomainPolicy=of("Shared", "UniquePerReplica")),
        )
    ),
    ("kueue.x-k8s.io/v1beta1", "ClusterQueue"): document(
        fields(
            admissionChecks=items(TEXT),
            admissionChecksStrategy=OBJECT,
            admissionScope=OBJECT,
            cohort=TEXT,
            excludeResourcePrefixes=items(TEXT),
            fairSharing=OBJECT,
            flavorFungibility=OBJECT,
            namespaceSelector=SELECTOR,
            preemption=OBJECT,
            queueingStrategy=of("StrictFIFO", "BestEffortFIFO"),
            resourceGroups=items(
                fields(
                    "coveredResources",
                    "flavors",
                    coveredResources=items(TEXT),
                    flavors=items(
                        fields(
                            "name",
                            "resources",
                            name=TEXT,
                            resources=items(
                                fields(
                                    "name",
                                    "nominalQuota",
                                    name=TEXT,
                                    nominalQuota=QUANTITY,
                                    borrowingLimit=QUANTITY,
                                    lendingLimit=QUANTITY,
                                )
                            ),
                        )
                    ),
                )
            ),
            stopPolicy=of("None", "Hold", "HoldAndDrain"),
        )
    ),
    ("kueue.x-k8s.io/v1beta1", "LocalQueue"): document(
        fields(clusterQueue=TEXT, stopPolicy=of("None", "Hold", "HoldAndDrain"))
    ),
    ("kueue.x-k8s.io/v1beta1", "ResourceFlavor"): document(
        fields(nodeLabels=LABELS, nodeTaints=items(OBJECT), tolerations=items(OBJECT), topologyName=TEXT)
    ),
}
