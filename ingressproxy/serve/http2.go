package serve

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"

	"golang.org/x/net/http2"

	"keelson.dev/keelson/internal/framelimit"
)

// withoutTLS is net/http's key for connections of HTTP/2 without TLS in Server.TLSNextProto. It passes them as a *tls.Conn
// whose NetConn has the method UnencryptedNetConn, after it has read the preface.
const withoutTLS = "unencrypted_http2"

// limitResets reads the server's HTTP/2 connections, over TLS and without TLS, through a bound on stream resets. net/http's
// own HTTP/2 accepts no wrapped connections; that of golang.org/x/net, which is the same code, does. Only resets are
// bounded: fast downloads need many window updates, and the server itself bounds streams and what it queues in response.
func limitResets(srv *http.Server, resets int) error {
	h2 := &http2.Server{}
	if err := http2.ConfigureServer(srv, h2); err != nil {
		return fmt.Errorf("configuring HTTP/2: %w", err)
	}
	limits := framelimit.Limits{AuthenticatedResets: float64(resets)}
	known := func() bool { return true }
	srv.TLSNextProto[http2.NextProtoTLS] = func(hs *http.Server, c *tls.Conn, h http.Handler) {
		h2.ServeConn(framelimit.New(c, known, limits), serveOptions(hs, h))
	}
	srv.TLSNextProto[withoutTLS] = func(hs *http.Server, c *tls.Conn, h http.Handler) {
		inner, ok := c.NetConn().(interface{ UnencryptedNetConn() net.Conn })
		if !ok {
			return // net/http closes the connection
		}
		opts := serveOptions(hs, h)
		opts.SawClientPreface = true
		h2.ServeConn(framelimit.NewWithoutTLS(inner.UnencryptedNetConn(), known, limits), opts)
	}
	return nil
}

// serveOptions returns how a connection is served to which net/http has given a handler.
func serveOptions(hs *http.Server, h http.Handler) *http2.ServeConnOpts {
	ctx := context.Background()
	if base, ok := h.(interface{ BaseContext() context.Context }); ok { // net/http's own contract with x/net
		ctx = base.BaseContext()
	}
	return &http2.ServeConnOpts{Context: ctx, Handler: h, BaseConfig: hs}
}
