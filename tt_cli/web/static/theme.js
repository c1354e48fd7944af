"use strict";(()=>{try{let t=localStorage.getItem("tt-theme");(t==="light"||t==="dark")&&(document.documentElement.dataset.theme=t)}catch{}})();
