package serve

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"

	"golang.org/x/net/http2"

	"keelson.dev/keelson/internal/framelimit"
)

// limitResets reads the server's HTTP/2 connections over TLS through a bound on stream resets. net/http's own HTTP/2
// accepts no wrapped connections; that of golang.org/x/net, which is the same code, does. Only resets are bounded: fast
// downloads need many window updates, and the server itself bounds streams and what it queues in response.
func limitResets(srv *http.Server, resets int) error {
	h2 := &http2.Server{}
	if err := http2.ConfigureServer(srv, h2); err != nil {
		return fmt.Errorf("configuring HTTP/2: %w", err)
	}
	limits := framelimit.Limits{KnownResets: float64(resets)}
	srv.TLSNextProto[http2.NextProtoTLS] = func(hs *http.Server, c *tls.Conn, h http.Handler) {
		ctx := context.Background()
		if base, ok := h.(interface{ BaseContext() context.Context }); ok { // net/http's own contract with x/net
			ctx = base.BaseContext()
		}
		limited := framelimit.New(c, func() bool { return true }, limits)
		h2.ServeConn(limited, &http2.ServeConnOpts{Context: ctx, Handler: h, BaseConfig: hs})
	}
	return nil
}
