package apiserver

import (
	"net/http"
	"net/http/pprof"
)

// profiles is the path prefix of the Go profiles of this process, as in Kubernetes. Access to them
// requires the right to read the path. "go tool pprof" reads them.
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
