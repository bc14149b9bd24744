// The group that is shown, under other objectives: put into the sliders when it changes.
let widget = null, widgetGroup = null, widgetHas = null;

function fillWidget(group) {
  widgetGroup = group;
  if (!$("widget-fold").open) return;
  const rows = group ? group.rows.filter((row) => row.reward !== null) : [];
  const known = rows.length > 1;
  const has = known ? JSON.stringify([group.mode, group.step, group.index, group.prompt]) : "";
  if (has === widgetHas) return; // what the reader set stays
  widgetHas = has;
  const given = known ? { rewards: rows.map((row) => row.reward), lengths: rows.map(rowSize) } : {};
  $("widget-of").textContent = known ? `Set to step ${group.step}, group ${group.index + 1}. Move the sliders to see what would change.` : "An example. Move the sliders.";
  if (widget) widget.set(given);
  else widget = mountGroupWidget($("widget-body"), given);
}

const startWidget = () => $("widget-fold").addEventListener("toggle", () => fillWidget(widgetGroup));
