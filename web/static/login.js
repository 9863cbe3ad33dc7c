/* The one-time code comes in the link's fragment, which never leaves the browser by itself. */

const form = document.getElementById("login");
const code = new URLSearchParams(location.hash.slice(1)).get("code");
if (code) {
  history.replaceState(null, "", location.pathname + location.search);
  document.getElementById("code").value = code;
  form.requestSubmit();
}
