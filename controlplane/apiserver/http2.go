package apiserver

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"time"

	"golang.org/x/net/http2"

	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/framelimit"
	"keelson.dev/keelson/internal/gcheadroom"
)

// withoutEnd is the time limit of requests that net/http is given. Paces end them much earlier. With any limit, a stream
// of HTTP/2 has its timers from its first frame, and its end stops them for good; without one, a deadline that is set
// while the client resets the stream would keep the stream, its request and a timer until the deadline.
const withoutEnd = 10 * 365 * 24 * time.Hour

// limitFrames has the server's HTTP/2 connections read through frame limits. net/http's own HTTP/2 takes no wrapped
// connections, that of golang.org/x/net, which is the same code, does.
func limitFrames(srv *http.Server, limits framelimit.Limits) error {
	h2 := &http2.Server{}
	limits.Exceeded = gcheadroom.Restrain
	srv.ReadTimeout, srv.WriteTimeout = withoutEnd, withoutEnd
	srv.Handler = framelimit.Handler(srv.Handler)
	if err := http2.ConfigureServer(srv, h2); err != nil {
		return fmt.Errorf("configuring HTTP/2: %w", err)
	}
	srv.TLSNextProto[http2.NextProtoTLS] = func(hs *http.Server, c *tls.Conn, h http.Handler) {
		ctx := context.Background()
		if base, ok := h.(interface{ BaseContext() context.Context }); ok { // net/http's own contract with x/net
			ctx = base.BaseContext()
		}
		limited := framelimit.New(c, connlimit.FromConn(c).IsAuthenticated, limits)
		h2.ServeConn(limited, &http2.ServeConnOpts{Context: limited.Context(ctx), Handler: h, BaseConfig: hs})
	}
	return nil
}
