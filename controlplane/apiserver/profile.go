package apiserver

import (
	"net/http"
	"net/http/pprof"
)

// profiles is where Kubernetes serves the profiles of the process, to those who may
// read the path: administrators. "go tool pprof" reads them.
const profiles = "/debug/pprof"

func serveProfile(w http.ResponseWriter, r *http.Request, name string) {
	switch name {
	case "":
		pprof.Index(w, r)
	case "cmdline":
		pprof.Cmdline(w, r)
	case "profile":
		pprof.Profile(w, r)
	case "symbol":
		pprof.Symbol(w, r)
	case "trace":
		pprof.Trace(w, r)
	default:
		pprof.Handler(name).ServeHTTP(w, r)
	}
}
