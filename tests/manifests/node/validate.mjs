// Reads a JSON list of custom resources, prints a JSON list of what their published schemas say against them.
import { readFileSync } from "node:fs";
import * as certificates from "@kubernetes-models/cert-manager/cert-manager.io/v1";
import * as monitoring from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";

const models = { "cert-manager.io/v1": certificates, "monitoring.coreos.com/v1": monitoring };
const problems = [];
for (const object of JSON.parse(readFileSync(0, "utf8"))) {
  try {
    const Model = models[object.apiVersion][object.kind];
    new Model(object).validate();
  } catch (error) {
    problems.push(`${object.kind}/${object.metadata.name}: ${error.message}`);
  }
}
console.log(JSON.stringify(problems));
