package apiserver

import (
	"net/http"
	"net/http/pprof"
)

// profilePrefix is the path prefix of the Go profiles of this process, as in Kubernetes. Access to
// a profile requires the permission to get its path. "go tool pprof" reads the profiles.
const profilePrefix = "/debug/pprof"

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
