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

// unlimitedTimeout is the read and write timeout for net/http. clientPace limits requests much
// earlier. If net/http has any timeout, an HTTP/2 stream has its timers from its first frame, and
// they are stopped when the stream ends. Without a timeout, a deadline that is set while the client
// resets the stream would keep the stream, its request and a timer in memory until the deadline.
const unlimitedTimeout = 10 * 365 * 24 * time.Hour

// limitFrames applies frame limits to the server's HTTP/2 connections. It uses
// golang.org/x/net/http2, because the HTTP/2 of net/http does not accept wrapped connections. Both
// have the same code.
func limitFrames(srv *http.Server, limits framelimit.Limits) error {
	h2 := &http2.Server{}
	limits.Exceeded = gcheadroom.Restrain
	srv.ReadTimeout, srv.WriteTimeout = unlimitedTimeout, unlimitedTimeout
	srv.Handler = framelimit.Handler(srv.Handler)
	if err := http2.ConfigureServer(srv, h2); err != nil {
		return fmt.Errorf("configuring HTTP/2: %w", err)
	}
	srv.TLSNextProto[http2.NextProtoTLS] = func(hs *http.Server, c *tls.Conn, h http.Handler) {
		ctx := context.Background()
		if base, ok := h.(interface{ BaseContext() context.Context }); ok {
			// net/http passes its context to golang.org/x/net by this method
			ctx = base.BaseContext()
		}
		limited := framelimit.New(c, connlimit.FromConn(c).IsAuthenticated, limits)
		h2.ServeConn(limited, &http2.ServeConnOpts{Context: limited.Context(ctx), Handler: h, BaseConfig: hs})
	}
	return nil
}
