package dns

import (
	"context"
	"net"
	"net/http"
	"time"

	"keelson.dev/keelson/internal/connlimit"
)

// serveHTTPPath serves one HTTP path on the listener l, until ctx ends or l is closed. It limits
// the number of connections, the size of headers, and the time of requests.
func (f *addressListener) serveHTTPPath(
	ctx context.Context, l net.Listener, port uint16, path string, h http.HandlerFunc,
) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+path, h)
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second,
		WriteTimeout: 10 * time.Second,
		IdleTimeout:  time.Minute, MaxHeaderBytes: 8 << 10}
	if f.httpServers == nil {
		f.httpServers = make(map[uint16]*http.Server)
	}
	f.httpServers[port] = srv
	f.done.Go(func() {
		stop := context.AfterFunc(ctx, func() { srv.Close() })
		defer stop()
		// returns an error when it is closed
		_ = srv.Serve(connlimit.New(l, connlimit.Limits{Total: 32, PerSource: 16, Unauthenticated: 32,
			UnauthenticatedPerSource: 16}))
	})
}
