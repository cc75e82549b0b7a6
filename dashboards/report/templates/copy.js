// Buttons that copy the command beside them; where the clipboard is not to be had, the command is selected.
async function copyCommand(button) {
  const code = button.parentElement.querySelector("code");
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
  setTimeout(() => { button.textContent = "Copy"; }, 1600);
}

function listenToCopy() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.copy");
    if (button) copyCommand(button);
  });
}
