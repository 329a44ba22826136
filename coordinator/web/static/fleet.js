// The replicas, and the last messages.

import { at, make, seconds } from "./dom.js";

export function showFleet(run) {
  at("fleet-section").hidden = run.replicas.length === 0;
  at("replicas").replaceChildren(...run.replicas.map((replica) => {
    const row = make("tr");
    const state = !replica.there ? "lost" : replica.evaluates ? "evaluates" : replica.serving ? "serving" : "not serving";
    row.append(
      make("td", replica.name),
      make("td", state, (replica.serving || replica.evaluates) && replica.there ? "good" : "bad"),
      make("td", replica.policy_version === null ? "–" : String(replica.policy_version)),
      make("td", seconds(replica.sync_s)),
      make("td", replica.outcome || "–", replica.outcome === "poisoned" ? "bad" : ""),
      make("td", String(Math.max(0, replica.starts - 1))),
    );
    return row;
  }));
}

export function showMessages(run) {
  at("messages-section").hidden = run.messages.length === 0;
  at("messages").replaceChildren(...[...run.messages].reverse().map((message) => {
    const line = make("li", undefined, message.kind);
    line.append(make("time", new Date(message.time_s * 1000).toLocaleTimeString()), document.createTextNode(message.text));
    return line;
  }));
}
