// The tree of a forked group: each stretch of tokens once, what goes on from it below, rewards at the completions.
const spreadOf = ([low, high]) => (low === undefined ? "–" : low === high ? signed(low) : `${signed(low)} to ${signed(high)}`);
const chip = (name, value) => el("span", {}, name + " ", el("b", {}, value));

function treeView(group, current, choose, reach) {
  const item = (node, name) => {
    const [first, end] = node.rows, rows = group.rows.slice(first, end), row = rows[0];
    const isEnd = !node.branches.length, isCurrent = current >= first && current < end;
    const spans = group.rows[node.shown].spans.filter((span) => (span.level || 0) === node.level);
    const rest = isEnd ? [
      ...(rows.length === 1 && Object.keys(row.rewards).length > 1 ? Object.entries(row.rewards).map(([of, value]) => chip(plain(of), number(value))) : []),
      chip("length", lengthOf(row) + (row.truncated ? ", truncated" : ""))] : [];
    const head = el("div", { class: "chips" },
      isEnd ? el("button", { type: "button", "data-key": "row-" + first, "aria-current": String(isCurrent), "aria-label": `completion ${first + 1} of ${group.rows.length}`, onclick: () => choose(first) }, `Completion ${first + 1}`)
        : el("b", {}, (node.level ? "Branch " : "Parent ") + name),
      isEnd ? verdict(row) : null,
      rows.length > 1 && isEnd ? el("b", { class: "uncut" }, `not cut (× ${rows.length})`) : null,
      chip(rows.every((other) => other.reward === row.reward) ? "reward" : "mean reward", number(node.reward)),
      chip("advantage", spreadOf(node.advantages)), rest);
    const box = el("div", { class: "text-box", dir: "ltr" }, spans.length ? colored(spans, reach) : el("span", { class: "unit" }, row.cut ? "left out here" : "nothing"));
    const length = spans.reduce((sum, span) => sum + span.text.length, 0);
    return el("li", { class: isCurrent ? "current" : "" }, head, ...folding(box, length, "stretch"), isEnd ? null : list(node.branches, name + "."));
  };
  const list = (nodes, prefix) => el("ul", {}, nodes.map((node, i) => item(node, prefix + (i + 1))));
  const tree = list(group.tree, "");
  tree.className = "tree";
  tree.setAttribute("aria-label", "Completions as a tree");
  return tree;
}

// "2 parents, 2 levels of 3 branches"
function treeTitle(group) {
  const [levels, branches] = [group.forks.length, group.forks[0]];
  return `${group.tree.length} parents, ` + (levels === 1 ? `${branches} branches each` : `${levels} levels of ${branches} branches`);
}
