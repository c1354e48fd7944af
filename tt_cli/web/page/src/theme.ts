// Runs before the first paint: the colours this person chose last time, if any.
try {
  const chosen = localStorage.getItem("tt-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // storage is off: the system's preference counts
}
