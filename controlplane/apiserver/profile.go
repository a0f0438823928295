package apiserver

import (
	"net/http"
	"net/http/pprof"
)

// profiles is the path prefix of the Go profiles of this process, as in Kubernetes. Only users who
// may read the path get them. "go tool pprof" reads them.
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
