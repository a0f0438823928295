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

// protoUnencryptedHTTP2 is net/http's key in Server.TLSNextProto for HTTP/2 without TLS. After it
// has read the preface, net/http passes such a connection as a *tls.Conn. Its NetConn has a method
// UnencryptedNetConn.
const protoUnencryptedHTTP2 = "unencrypted_http2"

// limitResets limits stream resets on the server's HTTP/2 connections, with and without TLS.
// net/http's own HTTP/2 does not accept wrapped connections; golang.org/x/net, which has the same
// code, does. Only resets are limited: fast downloads need many window updates, and the server
// itself limits streams and queued responses.
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
	srv.TLSNextProto[protoUnencryptedHTTP2] = func(hs *http.Server, c *tls.Conn, h http.Handler) {
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

// serveOptions returns the x/net options for a connection and handler that net/http passed.
func serveOptions(hs *http.Server, h http.Handler) *http2.ServeConnOpts {
	ctx := context.Background()
	if base, ok := h.(interface{ BaseContext() context.Context }); ok { // an internal contract between net/http and x/net
		ctx = base.BaseContext()
	}
	return &http2.ServeConnOpts{Context: ctx, Handler: h, BaseConfig: hs}
}
