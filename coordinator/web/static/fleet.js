// The replicas, who came and left in the life of the run, and the last messages.

import { at, make, number, seconds } from "./dom.js";

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

const cost = (took, tokens) => {
  const parts = [took ? seconds(took) : "", tokens ? `${tokens < 1e6 ? tokens : number(tokens)} tokens` : ""].filter(Boolean);
  return parts.length ? ` (${parts.join(", ")})` : "";
};

export function showLife(run) {
  at("life-section").hidden = run.life.length === 0;
  const totals = Object.entries(run.life_totals);
  at("life-totals").textContent = totals.map(([kind, [times, took, tokens]]) => `${kind} ${times}×${cost(took, tokens)}`).join(" · ");
  at("life").replaceChildren(...[...run.life].reverse().map(([when, who, kind, why, took, tokens]) => {
    const line = make("li", undefined, /lost|full|quarantined/.test(kind) ? "warning" : "state");
    const what = `${who}${kind.slice(kind.indexOf(" "))}: ${why}${cost(took, tokens)}`;
    line.append(make("time", new Date(when * 1000).toLocaleString()), document.createTextNode(what));
    return line;
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
